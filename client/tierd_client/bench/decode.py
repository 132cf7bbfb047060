"""A loop that keeps a GPU as busy as decoding does: a CUDA graph a step, back to back."""

from __future__ import annotations

from collections import deque

import torch

LAYERS = 36
BATCH = 64
SHAPES = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))
"""In and out of a layer of Qwen3-8B: QKV, the projection back, gate and up, down."""
AHEAD = 3
"""Steps that are enqueued before the oldest has run: the GPU never waits for the CPU."""


class DecodeLoop:
    """The matrix products of a decode step of Qwen3-8B in bf16, batch 64: no attention, no KV.

    Takes 13 GiB of GPU memory for weights. They are all alike: random ones bring the GPU to its
    power limit, and the regulation of its clock then hides what is to be measured.
    """

    def __init__(self, device: torch.device) -> None:
        kind = {"dtype": torch.bfloat16, "device": device}
        self._weights = [
            [torch.full((into, out), 1 / into, **kind) for into, out in SHAPES]
            for _ in range(LAYERS)
        ]
        self._input = torch.ones(BATCH, SHAPES[0][0], **kind)
        self._device = device
        self.stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self._forward()
        self.stream.synchronize()
        with torch.cuda.graph(self._graph, stream=self.stream):
            self._forward()
        self._running: deque[torch.cuda.Event] = deque()

    def _forward(self) -> torch.Tensor:
        hidden = self._input
        for qkv, back, gate_up, down in self._weights:
            hidden = (hidden @ qkv)[:, : back.shape[0]] @ back
            gate, up = (hidden @ gate_up).chunk(2, dim=1)
            hidden = (gate * up) @ down
        return hidden

    def step(self) -> None:
        """Enqueue a step; returns when at most `AHEAD` are left to run."""
        with torch.cuda.stream(self.stream):
            self._graph.replay()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._running.append(event)
        if len(self._running) > AHEAD:
            self._running.popleft().synchronize()

    def mark(self) -> torch.cuda.Event:
        """The moment at which all steps so far have run."""
        return self._running[-1]
