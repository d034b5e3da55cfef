"""Which of SGLang's HTTP routes are served with ``--ep-backend eep``, and why the others are not.

A route is served if it is known to do no harm to ranks that serve together. All others are refused, those of later versions
too: a route that a rank obeys outside of its steps may end all ranks at once. The lists hold the routes of every supported
version as SGLang writes them, ``{parameter}`` included.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache

ALLOW = "EEP_ALLOW_ROUTES"
"""The variable in which an operator names routes that are served all the same, with commas between."""

CHANGE = (
    "with --ep-backend eep a server cannot change its weights or release its memory: a rank that comes back would have the "
    "weights of the start. Start another server with the new weights"
)
COMPARE = (
    "with --ep-backend eep the weights of ranks cannot be compared: each rank holds other experts, and ranks exchange "
    "nothing outside of steps. Compare the answers of two servers instead"
)
_UNLIKE_PEERS = (
    "with --ep-backend eep the settings of ranks cannot be changed while they run: a rank that comes back would have those "
    "of the start. Start another server with other flags"
)
_SLOW = (
    "with --ep-backend eep ranks cannot be slowed down: their peers would take them for lost. Start the server with "
    "--eep-faults on, and use 'eep fault slow'"
)
_COUNTS = (
    "with --ep-backend eep ranks cannot record which experts are used: they would add up their counts outside of steps, and "
    "end. Use a server without eep"
)
_SCALE = "eep decides how many ranks there are. Use 'eep rank launch' and 'eep rank remove'"
_NO_LORA = "--ep-backend eep serves no adapters: repair does not move them. Start another server with merged weights"
_NO_OUTER_CACHE = (
    "--ep-backend eep has no prefix cache outside of the device. Use /flush_cache for the one that there is"
)
_NO_DRAFTS = "--ep-backend eep does not speculate, so it has no corpus to speculate from. Leave this out"
_NO_ROLES = "with --ep-backend eep prefill and decode run on the same ranks. Leave this out"
_NO_SOUND = "--ep-backend eep serves text alone: no model of sound has been tried. Use a server without eep"
_DUMPS = (
    "with --ep-backend eep ranks write no tensors to files: their peers would wait for them. Use a server without eep"
)
_PROFILE = (
    "with --ep-backend eep a rank that starts or writes a profile may keep its peers waiting for longer than "
    f"--eep-timeout-ms, and they would take it for lost. Start the server with {ALLOW}=/start_profile,/stop_profile and a "
    "larger --eep-timeout-ms to profile all the same"
)

ALLOWED = frozenset(
    (
        # Requests.
        "/generate",
        "/encode",
        "/classify",
        "/invocations",
        "/vertex_generate",
        "/api/chat",
        "/api/generate",
        "/v1/chat/completions",
        "/v1/classify",
        "/v1/completions",
        "/v1/decisions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/rerank",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/score",
        "/v1/systemone",
        "/abort_request",
        "/open_session",
        "/close_session",
        "/pause_generation",  # in one of its modes: see broadcasts
        "/continue_generation",
        # What the front end answers by itself.
        "/",
        "/api/show",
        "/api/tags",
        "/detokenize",
        "/docs",
        "/docs/oauth2-redirect",
        "/get_model_info",
        "/get_weight_version",
        "/metrics",
        "/metrics/",
        "/model_info",
        "/openapi.json",
        "/parse_function_call",
        "/ping",
        "/ready",
        "/redoc",
        "/separate_reasoning",
        "/set_trace_level",
        "/tokenize",
        "/v1/detokenize",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/{model:path}",
        "/v1/tokenize",
        "/weight_version",
        # Questions and orders to every rank that was seen to obey them between two steps.
        "/configure_logging",
        "/flush_cache",
        "/freeze_gc",
        "/get_load",
        "/get_server_info",
        "/health",
        "/health_generate",
        "/server_info",
        "/v1/loads",
    )
)

OWN = frozenset(
    (
        "/eep/",
        "/eep/apply",
        "/eep/events",
        "/eep/evidence",
        "/eep/experts",
        "/eep/operations",
        "/eep/operations/{ident}",
        "/eep/operations/{ident}/cancel",
        "/eep/ranks/{rank}/live",
        "/eep/ranks/{rank}/ready",
        "/eep/ready",
        "/eep/status",
        "/fault_tolerance/apply",
        "/fault_tolerance/status",
        "/v1/fault_tolerance/apply",
        "/v1/fault_tolerance/status",
    )
)
"""EEP's own routes (:mod:`sglang_patches.api`). The last four are SGLang's, should it have them."""

_REFUSED_FOR: Mapping[str, tuple[str, ...]] = {
    CHANGE: (
        "/begin_weight_update",
        "/destroy_weights_update_group",
        "/end_weight_update",
        "/get_remote_instance_transfer_engine_info",
        "/get_weights_by_name",
        "/init_weights_send_group_for_remote_instance",
        "/init_weights_update_group",
        "/release_memory_occupation",
        "/remote_instance_transfer_engine_info",
        "/resume_memory_occupation",
        "/send_weights_to_remote_instance",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/update_weights_from_tensor",
    ),
    COMPARE: ("/weights_checker",),
    _UNLIKE_PEERS: ("/set_internal_state",),
    _SLOW: ("/slow_down",),
    _COUNTS: (
        "/dump_expert_distribution_record",
        "/start_expert_distribution_record",
        "/stop_expert_distribution_record",
    ),
    _SCALE: ("/is_scaling_elastic_ep", "/scale_elastic_ep"),
    _NO_LORA: ("/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter"),
    _NO_OUTER_CACHE: (
        "/clear_hicache_storage_backend",
        "/get_hicache_l3_cache_layout",
        "/hicache/storage-backend",
        "/hicache/storage-backend/clear",
    ),
    _NO_DRAFTS: ("/add_external_corpus", "/list_external_corpora", "/remove_external_corpus"),
    _NO_ROLES: ("/pd_role_switch",),
    _NO_SOUND: ("/v1/audio/transcriptions", "/v1/realtime"),
    _DUMPS: ("/dumper/{method}",),
    _PROFILE: ("/start_profile", "/stop_profile"),
}
REFUSED: Mapping[str, str] = {route: why for why, routes in _REFUSED_FOR.items() for route in routes}
"""The routes that are known to do harm, or of no use, and what their caller is told."""

NAMED_BY: Mapping[str, str] = {
    "AIP_PREDICT_ROUTE": "/vertex_generate",
    "SGLANG_OLLAMA_CHAT_ROUTE": "/api/chat",
    "SGLANG_OLLAMA_GENERATE_ROUTE": "/api/generate",
    "SGLANG_OLLAMA_ROOT_ROUTE": "/",
    "SGLANG_OLLAMA_SHOW_ROUTE": "/api/show",
    "SGLANG_OLLAMA_TAGS_ROUTE": "/api/tags",
}
"""Variables with which an operator gives a route another name."""


def unknown(path: str) -> str:
    """What the caller of a route is told that is on neither list."""
    return (
        f"{path} is not known to be safe with --ep-backend eep: a rank that obeys an order outside of its steps may end all "
        f"ranks. Start the server with {ALLOW}={path} to serve it all the same"
    )


class RouteList:
    """The lists as one server has them: with the names that its environment gives to routes."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        renamed = {environment[variable] for variable in NAMED_BY if variable in environment}
        asked = {each.strip() for each in environment.get(ALLOW, "").split(",")} - {""}
        self._allowed = ALLOWED | OWN | renamed | asked

    def is_allowed(self, path: str) -> bool:
        return path in self._allowed or any(_pattern(each).fullmatch(path) for each in _with_parameters(self._allowed))

    def why_refused(self, path: str) -> str | None:
        """What the caller is told; None if the path is no route that is known to be refused."""
        if self.is_allowed(path):
            return None
        found = next((each for each in _with_parameters(REFUSED) if _pattern(each).fullmatch(path)), path)
        return REFUSED.get(found)


def _with_parameters(routes: Collection[str]) -> Iterator[str]:
    return (route for route in routes if "{" in route)


@cache
def _pattern(route: str) -> re.Pattern[str]:
    """What paths a route with ``{parameters}`` matches: one part of a path each, or, with ``:path``, all of the rest."""
    parts = re.split(r"(\{[^}]*\})", route)
    return re.compile(
        "".join(
            re.escape(part) if not part.startswith("{") else ".+" if part.endswith(":path}") else "[^/]+"
            for part in parts
        )
    )
