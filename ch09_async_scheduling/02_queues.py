"""Producer and consumer: handlers on the event loop, the engine in a thread, and two kinds of queue between them.

python 02_queues.py: handler -> inbox (queue.SimpleQueue) -> engine thread -> call_soon_threadsafe -> asyncio.Queue
"""

import asyncio
import queue
import threading
import time

STEP_SECONDS = 0.05  # what a pass of the model would take, for all requests together

# --- the idea, in thirty lines ----------------------------------------------------------------------------------------

Request = tuple[str, int, asyncio.Queue[str | None]]  # name, tokens, where they go
inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()


def engine(loop: asyncio.AbstractEventLoop) -> None:
    """The only thread that computes. It sleeps in the inbox when there is nothing to do."""
    running: list[Request] = []
    while True:
        while not running or not inbox.empty():  # take in what has come; wait only if nothing else is to be done
            request = inbox.get()
            if request is None:
                return
            running.append(request)
        time.sleep(STEP_SECONDS)  # one pass for all that run
        for i, (name, left, tokens) in enumerate(running):
            running[i] = (name, left - 1, tokens)
            # An asyncio.Queue may be touched on the event loop only, so the loop is asked to do it.
            loop.call_soon_threadsafe(tokens.put_nowait, f"{name}{left}")
            if left == 1:
                loop.call_soon_threadsafe(tokens.put_nowait, None)
        running = [request for request in running if request[1] > 0]


async def handler(name: str, tokens: int) -> None:
    """What an HTTP handler does: no thread is held while it waits."""
    stream: asyncio.Queue[str | None] = asyncio.Queue()
    inbox.put((name, tokens, stream))
    while (token := await stream.get()) is not None:
        log(f"client {name} gets {token}")


# --- the demonstration ------------------------------------------------------------------------------------------------

BEGAN = time.perf_counter()


def log(text: str) -> None:
    print(f"{time.perf_counter() - BEGAN:6.2f} s   {text}")


async def longest_wait(stop: asyncio.Event) -> float:
    """How late the event loop ever was for something that is due every 5 ms."""
    longest = 0.0
    while not stop.is_set():
        due = time.perf_counter() + 0.005
        await asyncio.sleep(0.005)
        longest = max(longest, time.perf_counter() - due)
    return longest


async def main() -> None:
    print("Clients A, B and C come 0.1 s apart and want 6, 4 and 3 tokens. Predict: who is done first, and how late is")
    print(f"the event loop at most, while the engine computes {STEP_SECONDS} s at a time?\n")
    thread = threading.Thread(target=engine, args=(asyncio.get_running_loop(),))
    thread.start()
    stop = asyncio.Event()
    watch = asyncio.create_task(longest_wait(stop))
    clients = []
    for name, tokens in (("A", 6), ("B", 4), ("C", 3)):
        clients.append(asyncio.create_task(handler(name, tokens)))
        await asyncio.sleep(0.1)
    await asyncio.gather(*clients)
    stop.set()
    late = await watch
    print(
        f"\nEach step made a token for everybody who was there. The event loop was never more than {late:.3f} s late,"
    )
    print(f"though every step took {STEP_SECONDS} s.")

    computed = time.process_time()
    await asyncio.sleep(0.5)
    computed = time.process_time() - computed
    print(
        f"With no request the engine sleeps in inbox.get(): half a second without one took {computed:.4f} s of a core."
    )
    inbox.put(None)
    thread.join()


if __name__ == "__main__":
    asyncio.run(main())
