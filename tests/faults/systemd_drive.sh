#!/bin/bash
# What tests/test_real_systemd.py does inside the machine of its own: each line that it prints is
# read there. The jobs are those of /srv/drive/jobs.py, the units those that `unit` installs.
exec >/dev/console 2>&1
batchrun=(/opt/batchrun/bin/batchrun --config /srv/shop/batchrun.toml)

as_shop() { setpriv --reuid=shop --regid=shop --clear-groups "$@"; }
unit() { echo "batchrun-shop-$1.service"; }
tell() {  # tell WHAT JOB: one line with what systemd knows of the job's unit
    local known
    known=$(systemctl show -p ActiveState,SubState,Result,NRestarts,ExecMainStatus "$(unit "$2")")
    echo "FOUND $1 $(tr '\n' ' ' <<<"$known")"
}
until_true() {  # until_true SECONDS COMMAND...: not longer than that
    local end=$((SECONDS + $1)); shift
    until "$@"; do [ $SECONDS -lt $end ] || return 1; sleep 0.2; done
}
is() { [ "$(systemctl show -p "$2" --value "$(unit "$1")")" = "$3" ]; }
batches() { as_shop "${batchrun[@]}" --json status "$1" | grep -o '"batches": [0-9]*' | grep -o '[0-9]*$'; }
has_batches() { [ "$(batches "$1")" -gt "$2" ] 2>/dev/null; }

useradd -r -M shop
install -d -o shop -g shop -m 700 /srv/shop /srv/shop/jobs
install -o shop -g shop -m 600 /srv/drive/batchrun.toml /srv/shop/batchrun.toml
install -o shop -g shop -m 600 /srv/drive/jobs.py /srv/shop/jobs/rejecting.py
cp -p /srv/shop/jobs/rejecting.py /srv/shop/jobs/poisonous.py
cp -p /srv/shop/jobs/rejecting.py /srv/shop/jobs/slow.py
printf '[Service]\nType=oneshot\nExecStart=/bin/sh -c "echo %%i >> /srv/mail"\n' \
    >/etc/systemd/system/mail@.service
as_shop "${batchrun[@]}" jobs >/dev/null
for job in rejecting poisonous slow; do
    "${batchrun[@]}" unit $job --every daily --on-failure mail@%n.service --install >/dev/null
done
systemctl daemon-reload

for job in rejecting poisonous; do
    systemctl start "$(unit $job)"
    until_true 20 eval "is $job SubState dead || is $job SubState failed"
    tell $job $job
done
until_true 20 test -s /srv/mail
echo "FOUND mail $(tr '\n' ' ' </srv/mail)"

systemctl start "$(unit slow)"
until_true 30 has_batches slow 0
systemctl stop "$(unit slow)"
tell stopped slow
systemctl start "$(unit slow)"
until_true 30 has_batches slow 2
before=$(batches slow)
systemctl kill -s KILL --kill-who=main "$(unit slow)"
until_true 10 is slow SubState auto-restart
tell killed slow
until_true 60 has_batches slow $((before + 1))
tell again slow
systemctl stop "$(unit slow)"
journalctl -u "$(unit slow)" --no-pager -o cat | sed 's/^/JOURNAL /'
systemctl poweroff
