"""What a worker was told at its start: vLLM's flags that matter here, the profile, and the two scales."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from prfaas.api.labels import PORT_HTTP, PORT_KV
from prfaas.api.profile import Profile, positive
from prfaas.worker.blocks import BlockPool
from prfaas.worker.events import EventsConfig
from prfaas.worker.exposed import CACHE_ATTRIBUTES, Exposed
from prfaas.worker.faults import Faults
from prfaas.worker.frontend import FrontEnd
from prfaas.worker.hashing import Algorithm

VLLM_VERSION = "0.33.0"
NIXL_CONNECTOR_VERSION = 15
DEFAULT_MAX_MODEL_LEN = 131_072
DEFAULT_LEASE_SECONDS = 30

Role = Literal["kv_producer", "kv_consumer", "kv_both"]
Mode = Literal["pull", "push", "mooncake"]
Attention = Literal["full", "hybrid"]


@dataclass(frozen=True)
class KVTransfer:
    """`--kv-transfer-config`, as far as it means something here."""

    role: Role
    engine_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    """`kv_connector_extra_config.kv_lease_duration`, modelled seconds."""
    recompute_on_failure: bool = False
    """`kv_load_failure_policy` is `recompute`."""
    host: str = "localhost"
    """VLLM_NIXL_SIDE_CHANNEL_HOST: where peers reach this worker."""
    port: int = PORT_KV
    """VLLM_NIXL_SIDE_CHANNEL_PORT."""
    lanes: int = 4
    """Connections of one transfer: NIXL's `num_threads`, or MC_TCP_LANES_PER_PEER; both are 4 unless set."""
    enforce_compatibility: bool = True
    """`kv_connector_extra_config.enforce_handshake_compat`."""
    engine_ttl: float = 3_600
    """`kv_connector_extra_config.engine_ttl`: how long an engine that nothing is wanted of is known. Modelled."""
    mode: Mode = "pull"
    """How caches move: NixlConnector and NixlPullConnector, NixlPushConnector, MooncakeConnector."""
    push_registration_seconds: float = 480
    """`push_registration_timeout`: a decode worker that was not written to for so long says so. Modelled."""
    abort_seconds: float = 480
    """VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT: how long the one leg waits for the other. Modelled."""
    bootstrap_port: int = 8998
    """VLLM_MOONCAKE_BOOTSTRAP_PORT."""
    bootstrap_address: str | None = None
    """`bootstrap_server_address`, host:port of a bootstrap server that somebody else runs."""
    dp_rank: int = 0
    """Of this server among those of a process; the first one runs the bootstrap server for all."""
    bootstrap_seconds: float = 30
    """VLLM_MOONCAKE_CONNECTOR_TIMEOUT, real seconds."""

    @property
    def produces(self) -> bool:
        """Whether prefills here are read by others."""
        return self.role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        """Whether this worker reads what others prefilled."""
        return self.role != "kv_producer"


@dataclass(frozen=True)
class WorkerConfig:
    """Everything an engine and its server need to know."""

    model: str
    profile: Profile
    time_scale: float = 1.0
    """Modelled seconds per real second."""
    kv_byte_scale: float = 1.0
    """Bytes on the wire per byte of KV."""
    served_names: tuple[str, ...] = ()
    host: str | None = None
    port: int = PORT_HTTP
    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    max_num_seqs: int = 1024
    block_size: int = 16
    num_gpu_blocks: int | None = None
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    attention_backend: str | None = None
    kv_transfer: KVTransfer | None = None
    hybrid_manager: bool = True
    """Not `--disable-hybrid-kv-cache-manager`: in the hash that peers compare."""
    draft_model: Mapping[str, Any] | None = None
    """A draft model that shares the KV cache: in the hash too."""
    shutdown_timeout: int = 0
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    api_keys: tuple[str, ...] = ()
    prompt_tokens_details: bool = False
    force_include_usage: bool = False
    request_id_headers: bool = False
    load_tracking: bool = False
    keep_alive_seconds: float = 5.0
    """VLLM_HTTP_TIMEOUT_KEEP_ALIVE."""
    front: FrontEnd = field(default_factory=FrontEnd)
    prefix_caching: bool = True
    hash_algorithm: Algorithm = "sha256"
    python_hash_seed: str | None = None
    """PYTHONHASHSEED, which block hashes begin with."""
    attention: Attention = "full"
    """What the model's KV cache is made of: attention only, or also the state of linear layers (`hybrid`)."""
    retention_interval: int | None = 0
    """`--prefix-cache-retention-interval`: tokens between kept states; None keeps all there are, 0 no regular ones."""
    max_num_batched_tokens: int = 8192
    """vLLM's default on H100, H200 and H20."""
    chunked_prefill: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    faults: Faults | None = None
    """Faults in force from the start; None: none can be asked for."""
    kv_events: EventsConfig | None = None
    """None: nothing is published."""
    exposed: Exposed = field(default_factory=Exposed)
    """Which metrics there are."""
    event_host: str = "127.0.0.1"
    """This host's address, VLLM_HOST_IP: where `tcp://*:0` binds."""

    def __post_init__(self) -> None:
        positive("--time-scale", self.time_scale)
        positive("--kv-byte-scale", self.kv_byte_scale)
        blocks = self.total_blocks
        if blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"{blocks} blocks of {self.block_size} tokens cannot hold one request of --max-model-len "
                f"{self.max_model_len}: raise --num-gpu-blocks-override or lower --max-model-len"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names that clients may ask for; the first is in labels and answers."""
        return self.served_names or (self.model,)

    @property
    def recomputes(self) -> bool:
        """Whether a failed KV transfer is followed by a prefill here."""
        return self.kv_transfer is not None and self.kv_transfer.recompute_on_failure

    @property
    def batch_limit(self) -> int:
        """Requests that hold a slot at the same time."""
        return min(self.max_num_seqs, self.profile.decode.max_batch)

    @property
    def metric_conditions(self) -> frozenset[str]:
        """Which metrics there are because of P/D (`exposed`)."""
        transfer = self.kv_transfer
        if transfer is None:
            return frozenset()
        connector = "mooncake" if transfer.mode == "mooncake" else "nixl"
        return frozenset((connector, "kv_consumer") if transfer.consumes else (connector,))

    @property
    def cache_info(self) -> dict[str, str]:
        """The labels of `vllm:cache_config_info`: vLLM's CacheConfig, every attribute of it as text."""
        blocks, hybrid = self.total_blocks, self.attention == "hybrid"
        known: dict[str, Any] = {
            "block_size": self.block_size,
            "cache_dtype": self.kv_cache_dtype,
            "enable_prefix_caching": self.prefix_caching,
            "num_gpu_blocks": blocks,
            "num_gpu_blocks_override": self.num_gpu_blocks,
            "prefix_caching_hash_algo": self.hash_algorithm,
            "prefix_cache_retention_interval": self.retention_interval,
            "mamba_block_size": self.block_size if hybrid else None,
            "mamba_cache_mode": "align" if hybrid and self.prefix_caching else "none",
            "hash_block_size": self.block_size,
            "cache_hit_alignment_tokens": self.block_size,
            "effective_attention_block_size": self.block_size,
            "kv_cache_size_tokens": blocks * self.block_size,
            "kv_cache_max_concurrency": blocks * self.block_size / self.max_model_len,
        }
        return {name: str(known.get(name, default)) for name, default in CACHE_ATTRIBUTES.items()}

    @property
    def total_blocks(self) -> int:
        """KV blocks: as overridden, or room for a full batch of the longest requests."""
        per_request = BlockPool(1, self.block_size).blocks_for(self.max_model_len)
        return self.num_gpu_blocks if self.num_gpu_blocks is not None else self.batch_limit * per_request

    @property
    def compatibility(self) -> str:
        """Hash over what must be equal on both sides of a KV transfer.

        vLLM's inputs as far as this worker has them, the KV size of the profile and the byte scale. Tensor parallelism
        and block size are not in it: they may differ.
        """
        inputs: dict[str, Any] = {
            "vllm": VLLM_VERSION,
            "connector": NIXL_CONNECTOR_VERSION,
            "model": self.model,
            "dtype": self.dtype,
            "cache_dtype": self.kv_cache_dtype,
            "attention_backend": self.attention_backend,
            "hma": self.hybrid_manager,
            "speculative": self.draft_model,
            "transfer_mode": self.kv_transfer.mode if self.kv_transfer is not None else "pull",
            "kv": self.profile.kv.to_wire(),
            "kv_byte_scale": self.kv_byte_scale,
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
