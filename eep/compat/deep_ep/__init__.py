"""DeepEP's interface. :mod:`eep.compat.low_latency` has the low-latency calls, over an :class:`eep.Buffer` in the ``expert``
layout, :mod:`eep.compat.normal_mode` those for any number of tokens, :mod:`eep.compat.elastic` the second interface.

``from eep.compat.deep_ep import Buffer`` takes the place of ``from deep_ep import Buffer``. Names, arguments, shapes and
types are DeepEP's. The rows of an expert lie without gaps, by source rank and then by token. These things are different:

* **Faults.** A rank that does not answer within ``timeout_ms`` is dropped whole: its tokens are absent, its
  mask is 1, and the step cannot be trusted. Only calls in which ranks meet raise because of a peer: those that
  make memory and ``barrier`` at once if its process has failed, else after a minute; ``connect_ranks`` after a minute.
* **The mask is the membership.** Changing it begins a new epoch, which abandons the dispatches in flight and
  forgets which ranks were dropped. All survivors make the same changes, in the same order, between the same
  two steps. A masked rank comes back only as a new process; no rank reads what the old one writes.
* **Memory.** A constructor that is given the number of bytes of the size hint makes its memory for the sizes of
  that hint. With another number it cannot know the sizes, and the first dispatch, or
  ``clean_low_latency_buffer``, makes the memory. A dispatch with other sizes than the last makes new memory: it is
  collective, and dispatches in flight are lost. Queue pairs and NVLink options are accepted and not needed. K is at
  most 16 and the same on all ranks.
* **Two dispatches may wait for their combine**; a third one takes the place of the older, which is then lost.
  Dispatches take turns on two sets of tensors, so the result of one stays valid until the second dispatch after
  it; until the next one, if an earlier dispatch still waits. A handle may be combined again until then, which
  costs a dispatch more.
* ``handle[0]`` is how combine finds its dispatch: pass that very tensor, not a copy.
* **CPU or GPU.** Memory is made where the tokens of the first dispatch are. On a GPU calls are work of the
  current stream, and a graph may capture them once the memory is there. Combine then does not notice a
  ``topk_idx`` that names other experts than its dispatch.

Only the constructor uses the process group, to agree on a rendezvous directory on this host and on the sizes.
``EEP_TIMEOUT_MS`` is the default of ``timeout_ms``, ``EEP_SHARES_GPU`` (0 or 1) that of ``shares_gpu``. Other environment
variables make an instance elastic. Set the first for all ranks or for none:

* ``EEP_RENDEZVOUS``: the directory. Without it rank 0 makes one, named by ``Buffer.rendezvous``, and removes
  it in the end. Set it if the instance is to outlive its rank 0.
* ``EEP_RANK``, ``EEP_WORLD_SIZE``: for a process that joins later, whose group holds only itself or is None:
  its rank, and how many ranks the instance was launched with. Its ``connect_ranks`` joins if the constructor was given
  the number of bytes of the size hint, else its first dispatch or ``clean_low_latency_buffer``. It waits until the others
  have called ``connect_ranks`` with its rank.
"""

from __future__ import annotations

import torch

from eep.compat.config import Config
from eep.compat.deep_ep import utils
from eep.compat.elastic import ElasticBuffer
from eep.compat.elastic_handle import EPHandle
from eep.compat.low_latency import DeepEpBuffer, Handle, Hook
from eep.compat.stream_events import EventHandle, EventOverlap

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "Handle",
    "Hook",
    "topk_idx_t",
    "utils",
]

Buffer = DeepEpBuffer
"""The name that programs written for DeepEP import."""

topk_idx_t = torch.int64
"""The type of expert indices."""
