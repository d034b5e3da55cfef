"""Which names of SGLang the plugin hooks, and in which versions they exist."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_patches.sglang_version import OLDEST, numbers


@dataclass(frozen=True)
class HookTarget:
    """A name below ``sglang.srt``, or one of ``sglang.kernels``: a module, then a function, or a class and a method."""

    name: str
    why: str
    parameters: tuple[str, ...] = ()
    """The parameters that our hook relies on."""
    since: str = OLDEST
    until: str = "9999"
    on_gpu: bool = False
    """Hooked only on a machine with a GPU. SGLang may bind the name only there."""

    def is_in(self, version: str) -> bool:
        return numbers(self.since) <= numbers(version) < numbers(self.until)


_MANAGER = "managers.tokenizer_manager.TokenizerManager."
_CONTROL = "managers.tokenizer_control_mixin.TokenizerControlMixin."
_CONTROLLER = "managers.data_parallel_controller.DataParallelController."
_EXPERTS = "layers.moe.moe_runner.triton_utils.fused_moe."
_FLOAT32 = "float32 on a GPU"
_EARLY = "its kernel reads what the kernel before it has not written yet"
_UNALIKE = "a rank that joins later would differ from its peers"

TARGETS = (
    HookTarget("mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal", "a cache that outlives its rank"),
    HookTarget("mem_cache.memory_pool.MLATokenToKVPool._create_buffers", "a cache that outlives its rank"),
    HookTarget(
        "mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        "the next life of a rank has as large a cache",
    ),
    HookTarget("mem_cache.memory_pool.ReqToTokenPool.__init__", "the rows of the cache outlive it too"),
    HookTarget("mem_cache.memory_pool.ReqToTokenPool.free", "a row that is given up has no context", ("req",)),
    HookTarget("mem_cache.memory_pool.ReqToTokenPool.clear", "rows that are given up have no context"),
    HookTarget(
        "managers.schedule_policy.PrefillAdder.add_one_req",
        "without a prefix cache, a request brings its context",
        ("req",),
    ),
    HookTarget(
        "mem_cache.unified_radix_cache.UnifiedRadixCache.prefix_device_indices",
        "the slots of a context that a request brought",
        ("req",),
        since="0.5.22",
    ),
    HookTarget("server_args.ServerArgs.add_cli_args", "the flags", ("parser",)),
    HookTarget("server_args.ServerArgs.from_cli_args", "the flags, and those that they imply", ("cls", "args")),
    HookTarget(
        "server_args.PortArgs.init_new",
        "the sockets between processes lie in the private directory",
        ("server_args", "dp_rank", "worker_ports"),
    ),
    HookTarget("plugins.load_plugins", "our own hooks in processes that SGLang does not prepare"),
    HookTarget("plugins.hook_registry.HookRegistry.apply_hooks", "installing hooks"),
    HookTarget("entrypoints.engine._set_envs_and_config", "how child processes are started", ("server_args",)),
    HookTarget("entrypoints.engine.run_data_parallel_controller_process", "plugins in the controller"),
    HookTarget("entrypoints.engine.run_detokenizer_process", "plugins in the detokenizer"),
    HookTarget(
        "entrypoints.engine.Engine._launch_scheduler_processes",
        "the controller owns the schedulers",
        ("cls",),
        since="0.5.22",
    ),
    HookTarget(
        "entrypoints.engine.Engine._launch_subprocesses",
        "what child processes run",
        ("cls", "run_scheduler_process_func"),
    ),
    HookTarget(
        "entrypoints.engine.Engine._launch_detokenizer_subprocesses",
        "a detokenizer that ends is replaced",
        ("cls",),
    ),
    HookTarget("managers.detokenizer_manager.DetokenizerManager.__init__", "an exception ends no other process"),
    HookTarget("managers.detokenizer_manager.DetokenizerManager.event_loop", "an exception ends no other process"),
    HookTarget(
        "managers.detokenizer_manager.DetokenizerManager._decode_batch_token_id_output",
        "no text is sent twice to the client of a request that has moved",
        ("recv_obj",),
    ),
    HookTarget("utils.auth.decide_request_auth", "probes and the page need no key", ("method", "path")),
    HookTarget(
        "entrypoints.http_server._setup_and_run_http_server",
        "routes that would end ranks are refused; readiness; the status of a server that resigned",
        ("server_args", "tokenizer_manager"),
    ),
    HookTarget(
        "managers.scheduler.run_scheduler_process",
        "what a rank runs",
        ("server_args", "port_args", "tp_rank", "dp_rank"),
    ),
    HookTarget(
        _CONTROLLER + "launch_tensor_parallel_group", "start, watch and relaunch ranks", ("server_args", "worker_ports")
    ),
    HookTarget(
        _CONTROLLER + "launch_dp_attention_schedulers",
        "the sockets of ranks lie in the private directory",
        ("server_args", "port_args"),
    ),
    HookTarget(_CONTROLLER + "event_loop", "route to ranks that live"),
    HookTarget(_CONTROLLER + "maybe_external_dp_rank_routing", "the front end chooses the rank", ("req",)),
    HookTarget(_MANAGER + "auto_create_handle_loop", "the front end hears of views"),
    HookTarget(_MANAGER + "sigterm_watchdog", "a server that is told to end does so in time"),
    HookTarget(_MANAGER + "freeze_gc", "the garbage collector leaves out what is there when the server is up"),
    HookTarget(_MANAGER + "generate_request", "no request has more samples than the front end can bear", ("obj",)),
    HookTarget(_MANAGER + "_dispatch_to_scheduler", "keep what is needed to replay a request"),
    HookTarget(_MANAGER + "_handle_batch_output", "what was delivered"),
    HookTarget(_MANAGER + "_handle_abort_req", "aborts of requests that moved"),
    HookTarget(
        "managers.communicator.FanOutCommunicator.__call__", "a question to all ranks while none is in", ("obj",)
    ),
    HookTarget(_MANAGER + "pause_generation", "a rank that is paused would be taken for lost", ("obj",)),
    HookTarget(_MANAGER + "update_weights_from_disk", _UNALIKE),
    HookTarget(_CONTROL + "update_weights_from_distributed", _UNALIKE),
    HookTarget(_CONTROL + "update_weights_from_tensor", _UNALIKE),
    HookTarget(_CONTROL + "update_weights_from_ipc", _UNALIKE),
    HookTarget(_CONTROL + "begin_weight_update", _UNALIKE, since="0.5.21"),
    HookTarget(_CONTROL + "release_memory_occupation", _UNALIKE),
    HookTarget(_CONTROL + "resume_memory_occupation", _UNALIKE),
    HookTarget(_CONTROL + "check_weights", _UNALIKE),
    HookTarget(
        "managers.scheduler_components.dp_attn.MLPSyncBatchInfo.all_gather", "the step boundary", ("device", "group")
    ),
    HookTarget(
        "managers.scheduler_components.dp_attn.exchange_sync_rows",
        "SGLang's goes through one rank, which may be lost",
        ("global_flat", "local_row", "group"),
        since="0.5.23",
    ),
    HookTarget(
        "managers.scheduler_components.request_receiver.SchedulerRequestReceiver.recv_requests", "a rank warms up"
    ),
    HookTarget(
        "managers.scheduler_components.ipc_channels.get_zmq_socket", "a spare listens to nothing", ("socket_type",)
    ),
    HookTarget(
        "managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
        "what a rank makes while it warms up is not sent",
        ("reqs",),
    ),
    HookTarget(
        "managers.tp_worker.TpModelWorker.forward_batch_generation", "the end of a step that generates", ("batch",)
    ),
    HookTarget("model_executor.model_runner.ModelRunner.forward", "the end of any other step", ("forward_batch",)),
    HookTarget("managers.scheduler.Scheduler.run_event_loop", "a rank says that an exception ends it"),
    HookTarget("managers.scheduler.Scheduler.run_batch", "overlap scheduling: a step is launched", ("batch",)),
    HookTarget("managers.scheduler.Scheduler._apply_war_barrier", "overlap scheduling: a step is run again"),
    HookTarget(
        "managers.scheduler.Scheduler.is_disable_overlap_for_batch",
        "overlap scheduling: results are handed out before the next step is launched",
        ("batch", "last_batch"),
    ),
    HookTarget(
        "managers.scheduler.Scheduler.process_batch_result",
        "overlap scheduling: results are handed out",
        ("batch", "result"),
    ),
    HookTarget("managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens", "overlap scheduling: penalties"),
    HookTarget(
        "managers.scheduler_components.batch_result_processor.release_kv_cache",
        "overlap scheduling: nothing that may be wrong goes into the prefix cache",
    ),
    HookTarget(
        "managers.scheduler.Scheduler.launch_batch_sample_if_needed",
        "overlap scheduling: some tokens are sampled later",
        ("batch_result", "cur_batch"),
    ),
    HookTarget(
        "model_executor.model_runner.ModelRunner.load_model",
        "expert weights in memory that repair can write",
        ("self",),
    ),
    HookTarget("model_loader.loader._initialize_model", "a model without memory, for weights that are there"),
    HookTarget(
        "model_loader.loader.DefaultModelLoader.load_weights_and_postprocess",
        "weights that are there are not loaded again",
        ("model", "weights", "target_device"),
    ),
    HookTarget(
        "managers.scheduler.Scheduler.process_input_requests", "what is for another life is dropped", ("recv_reqs",)
    ),
    HookTarget("managers.scheduler.Scheduler.flush_cache", "what is given up of a cache stays so"),
    HookTarget("managers.scheduler.Scheduler._add_request_to_queue", "a replayed request goes on where it was"),
    HookTarget("sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", "its penalties too", ("batch",)),
    HookTarget("layers.sampler.Sampler._sync_token_ids_across_tp", "a rank samples for itself alone"),
    HookTarget("layers.sampler.sampling_from_probs_torch", "draws by seed", ("probs", "sampling_seed", "positions")),
    HookTarget(
        "layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        "draws by seed among likely tokens",
        ("probs", "top_ks", "top_ps", "min_ps", "need_min_p_sampling", "sampling_seed", "positions"),
    ),
    HookTarget("distributed.bootstrap._resolve_backend", "process groups on eep", ("device",)),
    HookTarget(
        "distributed.parallel_state.init_distributed_environment", "a rank starts alone", ("world_size", "rank")
    ),
    HookTarget("distributed.parallel_state.GroupCoordinator.__init__", "process groups on eep", ("group_ranks",)),
    HookTarget(
        "model_executor.model_runner_components.load_model_utils.dist_barrier_after_load",
        "alone, a rank waits for no other",
    ),
    HookTarget("utils.common.broadcast_pyobj", "alone, a rank is told nothing", ("data",)),
    HookTarget(
        "layers.moe.fused_moe_triton.layer.FusedMoE.__init__", "every model has redundant slots", ("num_experts",)
    ),
    HookTarget("layers.moe.fused_moe_triton.layer.create_moe_dispatcher", "our dispatcher", ("moe_runner_config",)),
    HookTarget(
        "layers.moe.fused_moe_triton.layer.FusedMoE.forward_impl",
        "a layer runs once for each portion of a step",
        ("hidden_states", "topk_output"),
    ),
    HookTarget(
        "layers.moe.moe_runner.base.FusedOpPool.get_fused_func",
        "Triton's experts, fused into one call",
        ("dispatch_name", "runner_name"),
        on_gpu=True,
    ),
    HookTarget(
        "layers.moe.token_dispatcher.standard.StandardDispatchOutput.hidden_states_pre_quant",
        "tokens in fp8 for Triton",
        on_gpu=True,
    ),
    HookTarget(
        "layers.moe.token_dispatcher.deepep.DeepEPLLDispatchOutput.masked_m",
        "tokens by expert for DeepGEMM",
        on_gpu=True,
    ),
    HookTarget(
        "layers.moe.fused_moe_triton.layer.FusedMoE.weight_loader",
        "which slot an expert is loaded into",
        ("expert_id",),
    ),
    HookTarget(
        "layers.moe.fused_moe_triton.layer.FusedMoE.weight_loader_fused",
        "the same, for all experts of a layer in one tensor",
        ("param", "loaded_weight"),
    ),
    HookTarget("layers.moe.fused_moe_triton.layer.FusedMoE._weight_loader_impl", "loading one slot", ("expert_id",)),
    HookTarget("layers.moe.ep_moe.layer.get_moe_impl_class", "the layer that uses our dispatcher", ("quant_config",)),
    HookTarget("layers.moe.utils.MoeA2ABackend.is_deepep", "Qwen3-MoE asks for it", until="0.5.18"),
    HookTarget("layers.attention.torch_native_backend.TorchNativeAttnBackend", "it lacks a padding length"),
    HookTarget(
        "layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend",
        "latent attention without a prefix, and sinks",
        ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    ),
    HookTarget("layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_decode", "sinks"),
    HookTarget("layers.attention.torch_native_backend.scaled_dot_product_attention", "sinks"),
    HookTarget("models.gpt_oss.GptOssSparseMoeBlock.forward", "it would add up parts of ranks", ("hidden_states",)),
    HookTarget("models.gpt_oss.GptOssForCausalLM.__init__", "--dtype holds for all of the model", ("config",)),
    HookTarget("arg_groups.model_hook.attention_backends_of", "gpt-oss on a CPU", since="0.5.21"),
    HookTarget(
        "layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend",
        "a few tokens after a long prefix cost what decodes cost",
        (
            *("query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens"),
            *("extend_prefix_lens", "extend_seq_lens", "causal"),
        ),
    ),
    HookTarget(
        "layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode",
        "the same",
        ("query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens", "causal"),
    ),
    HookTarget(
        "layers.moe.fused_moe_native.moe_forward_native",
        "torch-native experts by local slot",
        ("layer", "x", "topk_output"),
    ),
    HookTarget(
        "layers.moe.topk.select_experts",
        "the torch-native gate knows no padding, and no gate knows masked experts",
        ("hidden_states", "router_logits", "topk_config", "layer_id"),
    ),
    HookTarget("managers.data_parallel_controller.maybe_reindex_device_id", "several ranks on one GPU", on_gpu=True),
    HookTarget(
        "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture",
        "graphs go through a buffer of their own",
        ("self",),
        on_gpu=True,
    ),
    HookTarget("layers.layernorm.RMSNorm.forward_cuda", _FLOAT32, ("x",), on_gpu=True),
    HookTarget(
        "layers.rotary_embedding.base.RotaryEmbedding.forward_cuda", _FLOAT32, ("positions", "query"), on_gpu=True
    ),
    HookTarget("models.utils.can_use_fused_inplace_qknorm", _FLOAT32, on_gpu=True),
    HookTarget(
        _EXPERTS + "moe_align_block_size",
        "its kernel has a race",
        ("topk_ids", "block_size", "num_experts"),
        on_gpu=True,
    ),
    HookTarget("kernels.ops.moe.moe_fused_gate.is_arch_support_pdl", _EARLY, until="0.5.21", on_gpu=True),
    HookTarget("kernels.ops.moe.moe_route_radix.is_arch_support_pdl", _EARLY, until="0.5.21", on_gpu=True),
    HookTarget(_EXPERTS + "invoke_fused_moe_kernel", _FLOAT32, on_gpu=True),
    HookTarget(_EXPERTS + "silu_and_mul", _FLOAT32, on_gpu=True),
    HookTarget(_EXPERTS + "moe_sum_reduce", _FLOAT32, on_gpu=True),
    HookTarget(
        "model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch",
        "it pins memory without asking whether that can be done",
        ("model_runner",),
        until="0.5.19",
    ),
)
_BY_NAME = {target.name: target for target in TARGETS}


def full_name(name: str) -> str:
    """The name of a target as Python imports it."""
    return f"sglang.{name}" if name.startswith("kernels.") else f"sglang.srt.{name}"


def exists_in(name: str, version: str) -> bool:
    """Whether the table says that the target exists in that version."""
    return _BY_NAME[name].is_in(version)
