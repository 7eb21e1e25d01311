
import time
from dataclasses import dataclass
from batchrun import job


@dataclass(frozen=True)
class Settings:
    keys: int
    sleep_s: float = 0.0
    once: bool = False
    first: int = 0


@job(settings=Settings)
def push(ctx):
    s = ctx.settings
    def call(key, record):
        if s.sleep_s:
            time.sleep(s.sleep_s)
        return {"id": record}
    records = list(range(s.first, s.first + s.keys))
    for batch in ctx.batches(records, name="main", size=s.keys):
        began, used = time.perf_counter(), time.process_time()
        if s.once:
            for record in batch:
                ctx.once(f"push/{record}", call, record)
        else:
            ctx.once_each(batch, idempotency_key=lambda record: f"push/{record}", call=call)
        print("took", time.perf_counter() - began, time.process_time() - used, flush=True)
        yield batch
