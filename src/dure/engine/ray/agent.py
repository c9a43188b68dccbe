"""An agent in an actor, as the driver sees it."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from dure.base.say import say
from dure.engine.attached import ALIVE, BEAT_SECONDS
from dure.engine.interface import LOST

_ASK_SECONDS = 0.3
"""Between two calls, in which output comes and orders go."""
_CALL_SECONDS = 1.0
"""How long to wait for an answer before looking whether the node is there."""


class RayAgent:
    """A `RunningAgent`. A thread calls the actor again and again."""

    def __init__(
        self,
        actor: Any,
        began: Any,
        name: str,
        on_line: Callable[[str, bool], None],
        is_dead: Callable[[], bool],
        lost_seconds: float,
    ) -> None:
        """`began` is the actor's call that starts the agent; `is_dead` asks Ray whether it has given the node up."""
        self._actor, self._began, self._name = actor, began, name
        self._on_line, self._is_dead, self._lost_seconds = on_line, is_dead, lost_seconds
        self._lock = threading.Lock()
        self._orders: list[tuple[str, dict[str, str | int]]] = []
        self._let_go = False
        self._code: int | None = None
        self._why = ""
        self._heard_at = math.inf  # a worker may take long to start, and Ray says when it cannot
        self._killed = threading.Event()
        self._thread = threading.Thread(target=self._attend, name=f"dure-{name}", daemon=True)
        self._thread.start()

    def exit_code(self) -> int | None:
        """None while it runs; LOST when its actor or its node is gone."""
        return self._code

    def lost_because(self) -> str:
        """What Ray knows."""
        return self._why

    def tell(self, name: str, **fields: str | int) -> None:
        """Send it a message with the next call."""
        with self._lock:
            self._orders.append((name, fields))

    def let_go(self) -> None:
        """Close its standard input, which asks it to end."""
        self._let_go = True

    def kill(self) -> None:
        """End the actor at once; its agent ends with it."""
        self._killed.set()
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actor, no_restart=True)

    def wait(self, deadline: float, check: Callable[[], None] = lambda: None) -> int | None:
        """Its exit code; None if it has not ended by then (`time.monotonic`)."""
        while self._code is None and time.monotonic() < deadline:
            check()
            time.sleep(0.05)
        if self._code is not None:
            self._thread.join(2.0)
        return self._code

    def _attend(self) -> None:
        try:
            code = self._until_it_ends()
        except Exception as error:  # a thread that ends without a word would leave the supervisor waiting
            self._why = f"its actor failed ({type(error).__name__}: {str(error).splitlines()[0]})"
            code = LOST
        if code == LOST and not self._killed.is_set():
            say(f"{self._name}: {self._why}")
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actor, no_restart=True)
        self._code = code

    def _until_it_ends(self) -> int:
        call, beat_at = self._began, 0.0
        sent: list[tuple[str, dict[str, str | int]]] = []
        while not self._killed.is_set():
            try:
                answer = ray.get(call, timeout=_CALL_SECONDS)
            except GetTimeoutError:
                if self._is_lost():
                    return LOST
                continue
            except ActorUnavailableError:
                if self._is_lost():
                    return LOST
                self._killed.wait(_ASK_SECONDS)
            except RayTaskError as error:
                return self._failed(error)
            except RayActorError as error:
                self._why = f"Ray says: {str(error).strip().splitlines()[0]}"
                self._is_lost()
                return LOST
            else:
                self._heard_at = time.monotonic()
                with self._lock:
                    del self._orders[: len(sent)]
                if answer is not None:
                    lines, code = answer
                    for line, is_output in lines:
                        self._on_line(line, is_output)
                    if code is not None:
                        return int(code)
                    self._killed.wait(_ASK_SECONDS)
            with self._lock:
                if time.monotonic() - beat_at >= BEAT_SECONDS and not self._let_go:
                    beat_at = time.monotonic()
                    self._orders.append((ALIVE, {}))
                sent = list(self._orders)  # again, if the last call has not come through
            call = self._actor.beat.remote(sent, self._let_go)
        self._why = "ended here"
        return LOST

    def _failed(self, error: RayTaskError) -> int:
        """The agent could not be started."""
        cause = getattr(error, "cause", None)
        say(f"{self._name}: {cause if cause is not None else str(error).splitlines()[-1]}")
        return int(getattr(cause, "exit_code", 1))

    def _is_lost(self) -> bool:
        """Whether Ray has given the node up, or it has been silent for too long."""
        silent = time.monotonic() - self._heard_at
        if self._is_dead():
            self._why = "Ray says that its node is dead"
        elif silent > self._lost_seconds:
            self._why = f"its actor has not answered for {silent:.0f} s"
        return bool(self._why)
