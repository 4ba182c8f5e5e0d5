-- Wireshark's view of flodl: every frame of its wire, down to the fields of the messages (docs/wire.md).
--
--   wireshark -X lua_script:tools/flodl.lua traffic.pcapng
--   tshark -X lua_script:tools/flodl.lua -r traffic.pcapng -Y 'flodl.timing.batch_loss > 1'
--
-- A connection is recognised by the magic it starts with; the preference "TCP ports" (-o flodl.ports:7000) takes others
-- too: those whose start was not captured, and those at a port that Wireshark has another protocol for, such as 7000. Fields are named after the crate's: flodl.<kind>.<field>. MACs are shown, not checked:
-- that takes the salt, and `python -m flodl_fast inspect --salt-file FILE traffic.pcapng`.

-- Made by scripts/make_dissector.py from flodl_fast/messages.py and protocol.py; not to be changed by hand.
local NUMBERS = {
  MAGIC_DATA_HELLO = 0xF10D17C0,
  MAGIC_DATA_ACK = 0xF10D17C1,
  MAGIC_CONTROL_HELLO = 0xF10D17C2,
  MAGIC_CONTROL_ACK = 0xF10D17C3,
  MAGIC_CONTROL_FRAME = 0xF10D17C4,
  MAGIC_MUX = 0xF10D17D0,
  MAGIC_ROUND = 0xF10D17F1,
  MAGIC_CHANNEL_RENDEZVOUS = 0xF10D17E0,
  MAGIC_CHANNEL_DATA = 0xF10D17E1,
  MAGIC_CHANNEL_CONTROL = 0xF10D17E2,
  MAGIC_CHANNEL_JOIN = 0xF10D17E3,
  CONTROL_HEADER = 24,
  MUX_HEADER = 25,
  ROUND_HEADER = 17,
  MAC_SIZE = 8,
  MAX_PAYLOAD = 16777216,
  FRAME_CEILING = 1073741824,
}
local REVISIONS = {
  ["0.6"] = {control = 2, data = 2, mux = 1, hello = 24},
  ["0.7"] = {control = 2, data = 2, mux = 1, hello = 24},
  ["0.8"] = {control = 4, data = 3, mux = 1, hello = 56},
}
local FAMILIES = {}
FAMILIES["Control"] = {kind = 1, prefix = "control", variants = {
    [0] = {name = "RequestParams", fields = {}},
    [1] = {name = "Update", fields = {{"version", {"u64"}}, {"next_plan", {"opt", {"struct", "EpochPlan@control"}}}}},
    [2] = {name = "SyncNow", fields = {}},
    [3] = {name = "StartEpoch", fields = {{"plan", {"struct", "EpochPlan@control"}}}},
    [4] = {name = "ExtendPartition", fields = {{"partition_offset", {"u64"}}, {"partition_size", {"u64"}}}},
    [5] = {name = "DeclareDead", fields = {{"rank", {"u64"}}}},
    [6] = {name = "RequestNewNcclId", fields = {}},
    [7] = {name = "NewNcclSession", fields = {{"uid_bytes", {"bytes"}}, {"new_rank", {"u64"}}, {"new_world_size", {"u64"}}}},
    [8] = {name = "Throttle", fields = {}},
    [9] = {name = "SetGlobalStep", fields = {{"global_step", {"u64"}}}},
    [10] = {name = "Checkpoint", fields = {{"version", {"u64"}}, {"target_rank", {"u64"}}}},
    [11] = {name = "ExecuteEvalCallback", fields = {{"schedule_id", {"u64"}}, {"epoch", {"u64"}}, {"target_rank", {"u64"}}}},
    [12] = {name = "SetEpochCallbackRole", fields = {{"rank", {"u64"}}}},
    [13] = {name = "Shutdown", fields = {}},
    [14] = {name = "ShutdownWithSave", fields = {{"reason", {"u8"}}}},
    [15] = {name = "EpochAggregated", fields = {{"metrics", {"struct", "EpochMetrics@control"}}}},
    [16] = {name = "EvalBroadcast", fields = {{"epoch", {"u64"}}, {"metric", {"f64"}}}},
    [17] = {name = "SaveConsensusModel", fields = {{"target_rank", {"u64"}}}},
    [18] = {name = "CoordHeartbeat", fields = {}},
    [19] = {name = "StageAdvisory", fields = {{"counts", {"list", {"u64"}}}, {"segments", {"list", {"tuple", {"u64"}, {"list", {"tuple", {"u64"}, {"u64"}}}}}}}},
  }}
FAMILIES["Timing"] = {kind = 2, prefix = "timing", variants = {
    [0] = {name = "Batch", fields = {{"rank", {"u64"}}, {"batch_ms", {"f64"}}, {"data_ms", {"f64"}}, {"step_count", {"u64"}}, {"param_norm", {"opt", {"f64"}}}, {"batch_loss", {"f64"}}, {"sync_divergence", {"opt", {"f64"}}}}},
    [1] = {name = "SyncAck", fields = {{"rank", {"u64"}}, {"step_count", {"u64"}}, {"divergence", {"opt", {"f64"}}}, {"post_norm", {"opt", {"f64"}}}, {"pre_norm", {"opt", {"f64"}}}}},
    [2] = {name = "Exiting", fields = {{"rank", {"u64"}}}},
    [3] = {name = "LrUpdate", fields = {{"rank", {"u64"}}, {"lr", {"f64"}}}},
    [4] = {name = "Intent", fields = {{"rank", {"u64"}}, {"kind", {"enum", "IntentKind"}}}},
    [5] = {name = "Heartbeat", fields = {{"rank", {"u64"}}, {"step_count", {"u64"}}}},
    [6] = {name = "SnapshotReady", fields = {{"rank", {"u64"}}}},
    [7] = {name = "EvalResult", fields = {{"rank", {"u64"}}, {"schedule_id", {"u64"}}, {"epoch", {"u64"}}, {"metric", {"f64"}}, {"elapsed_ms", {"f64"}}, {"error", {"opt", {"str"}}}}},
    [8] = {name = "CheckpointResult", fields = {{"rank", {"u64"}}, {"version", {"u64"}}, {"elapsed_ms", {"f64"}}, {"error", {"opt", {"str"}}}}},
    [9] = {name = "NewNcclIdGenerated", fields = {{"rank", {"u64"}}, {"uid_bytes", {"bytes"}}}},
    [10] = {name = "EpochFnElapsed", fields = {{"rank", {"u64"}}, {"epoch", {"u64"}}, {"elapsed_ms", {"f64"}}}},
    [11] = {name = "DashboardRegister", fields = {{"rank", {"u64"}}, {"port", {"u16"}}}},
    [12] = {name = "DashboardSetSvg", fields = {{"rank", {"u64"}}, {"svg", {"str"}}, {"label", {"opt", {"str"}}}, {"hash", {"opt", {"str"}}}}},
    [13] = {name = "DashboardSetMetadata", fields = {{"rank", {"u64"}}, {"json", {"str"}}}},
    [14] = {name = "DashboardSetHardware", fields = {{"rank", {"u64"}}, {"summary", {"str"}}}},
    [15] = {name = "ResourceSample", fields = {{"rank", {"u64"}}, {"sample", {"struct", "ResourceSample@timing"}}}},
  }}
FAMILIES["Metrics"] = {kind = 3, prefix = "metrics", fields = {{"rank", {"u64"}}, {"epoch", {"u64"}}, {"avg_loss", {"f64"}}, {"batches_processed", {"u64"}}, {"epoch_ms", {"f64"}}, {"samples_processed", {"u64"}}, {"share_complete_ms", {"f64"}}, {"compute_only_ms", {"f64"}}, {"data_starve_ms", {"f64"}}, {"scalars", {"map", {"str"}, {"tuple", {"f64"}, {"u64"}}}}, {"resources", {"opt", {"struct", "ResourceSample@metrics"}}}}}
FAMILIES["Rendezvous"] = {kind = 6, prefix = "rendezvous", variants = {
    [0] = {name = "Hello", fields = {{"dataset_sig", {"fixed", 32}}, {"global_rank", {"u32"}}, {"host_name", {"str"}}}},
    [1] = {name = "Role", fields = {{"role", {"enum", "RendezvousRole"}}}},
    [2] = {name = "Uid", fields = {{"uid_bytes", {"bytes"}}}},
  }}
FAMILIES["Join"] = {kind = 7, prefix = "join", variants = {
    [0] = {name = "Hello", fields = {{"host", {"str"}}, {"local_devices", {"bytes"}}, {"gpus", {"list", {"str"}}}, {"libtorch", {"str"}}, {"dataset_sig", {"fixed", 32}}, {"run_id", {"opt", {"str"}}, '0.8'}, {"nccl_version", {"opt", {"tuple", {"u32"}, {"u32"}, {"u32"}}}, '0.8'}, {"model_sig", {"opt", {"fixed", 32}}, '0.8'}}},
    [1] = {name = "Accept", fields = {{"ranks", {"list", {"u32"}}}, {"salt_hex", {"opt", {"str"}}}, {"formation_wait_secs", {"u64"}}}},
    [2] = {name = "Reject", fields = {{"reason", {"str"}}}},
    [3] = {name = "WorldFormed", fields = {{"envelope_hex", {"str"}}, {"relay_spec_hex", {"opt", {"str"}}}}},
    [4] = {name = "RankExited", fields = {{"rank", {"u32"}}, {"code", {"i32"}}}},
    [5] = {name = "Abort", fields = {{"reason", {"str"}}}},
  }}
FAMILIES["Relay"] = {kind = nil, prefix = "relay", variants = {
    [0] = {name = "Hello", fields = {{"host", {"str"}}, {"ranks", {"list", {"u32"}}}, {"model_sigs", {"list", {"fixed", 32}}, '0.8'}}},
    [1] = {name = "HelloAck", fields = {}},
    [2] = {name = "RankExit", fields = {{"rank", {"u32"}}}},
    [3] = {name = "DeclareDead", fields = {{"rank", {"u32"}}}},
  }}
local STRUCTS = {
  ["EpochPlan@control"] = {{"epoch", {"u64"}}, {"partition_offset", {"u64"}}, {"partition_size", {"u64"}}},
  ["EpochMetrics@control"] = {{"epoch", {"u64"}}, {"scalars", {"map", {"str"}, {"f64"}}}, {"per_rank", {"list", {"map", {"str"}, {"f64"}}}}, {"avg_loss", {"f64"}}, {"epoch_ms", {"f64"}}, {"per_rank_throughput", {"list", {"f64"}}}, {"per_rank_batch_share", {"list", {"f64"}}}, {"per_rank_share_complete_ms", {"list", {"f64"}}}, {"per_rank_compute_only_ms", {"list", {"f64"}}}, {"per_rank_data_starve_ms", {"list", {"f64"}}}, {"device_indices", {"bytes"}}, {"per_rank_loss", {"list", {"opt", {"f64"}}}, '0.7'}, {"per_rank_samples", {"list", {"u64"}}, '0.7'}},
  ["GpuSnapshot@timing"] = {{"device_index", {"u8"}}, {"name", {"str"}}, {"util_percent", {"opt", {"f32"}}}, {"vram_allocated_bytes", {"opt", {"u64"}}}, {"vram_total_bytes", {"opt", {"u64"}}}},
  ["ResourceSample@timing"] = {{"cpu_percent", {"opt", {"f32"}}}, {"ram_used_bytes", {"opt", {"u64"}}}, {"ram_total_bytes", {"opt", {"u64"}}}, {"gpu_util_percent", {"opt", {"f32"}}}, {"vram_total_bytes", {"opt", {"u64"}}}, {"vram_allocated_bytes", {"opt", {"u64"}}}, {"aggregate_rank", {"opt", {"u8"}}}, {"gpus", {"list", {"struct", "GpuSnapshot@timing"}}}},
  ["GpuSnapshot@metrics"] = {{"device_index", {"u8"}}, {"name", {"str"}}, {"util_percent", {"opt", {"f32"}}}, {"vram_allocated_bytes", {"opt", {"u64"}}}, {"vram_total_bytes", {"opt", {"u64"}}}},
  ["ResourceSample@metrics"] = {{"cpu_percent", {"opt", {"f32"}}}, {"ram_used_bytes", {"opt", {"u64"}}}, {"ram_total_bytes", {"opt", {"u64"}}}, {"gpu_util_percent", {"opt", {"f32"}}}, {"vram_total_bytes", {"opt", {"u64"}}}, {"vram_allocated_bytes", {"opt", {"u64"}}}, {"aggregate_rank", {"opt", {"u8"}}}, {"gpus", {"list", {"struct", "GpuSnapshot@metrics"}}}},
}
local ENUMS = {
  IntentKind = {[0] = "EvalNow", [1] = "CheckpointNow"},
  RendezvousRole = {[0] = "Generate", [1] = "Wait"},
  MsgKind = {[1] = "Control", [2] = "Timing", [3] = "Metrics", [4] = "ParamSnapshotMeta", [5] = "Heartbeat", [6] = "Rendezvous", [7] = "Join"},
  MuxKind = {[1] = "Data", [2] = "Control", [3] = "HostFrame", [4] = "Broadcast"},
  RoundKind = {[0] = "Model", [1] = "Control"},
}
local FIELDS = {
  control = {
    ["version"] = "u64",
    ["epoch"] = "u64",
    ["partition_offset"] = "u64",
    ["partition_size"] = "u64",
    ["rank"] = "u64",
    ["uid_bytes"] = "bytes",
    ["new_rank"] = "u64",
    ["new_world_size"] = "u64",
    ["global_step"] = "u64",
    ["target_rank"] = "u64",
    ["schedule_id"] = "u64",
    ["reason"] = "u8",
    ["scalars.key"] = "str",
    ["scalars.value"] = "f64",
    ["per_rank.key"] = "str",
    ["per_rank.value"] = "f64",
    ["avg_loss"] = "f64",
    ["epoch_ms"] = "f64",
    ["per_rank_throughput"] = "f64",
    ["per_rank_batch_share"] = "f64",
    ["per_rank_share_complete_ms"] = "f64",
    ["per_rank_compute_only_ms"] = "f64",
    ["per_rank_data_starve_ms"] = "f64",
    ["device_indices"] = "bytes",
    ["per_rank_loss"] = "f64",
    ["per_rank_samples"] = "u64",
    ["metric"] = "f64",
    ["counts"] = "u64",
    ["segments.0"] = "u64",
    ["segments.1.0"] = "u64",
    ["segments.1.1"] = "u64",
  },
  timing = {
    ["rank"] = "u64",
    ["batch_ms"] = "f64",
    ["data_ms"] = "f64",
    ["step_count"] = "u64",
    ["param_norm"] = "f64",
    ["batch_loss"] = "f64",
    ["sync_divergence"] = "f64",
    ["divergence"] = "f64",
    ["post_norm"] = "f64",
    ["pre_norm"] = "f64",
    ["lr"] = "f64",
    ["kind"] = "enum IntentKind",
    ["schedule_id"] = "u64",
    ["epoch"] = "u64",
    ["metric"] = "f64",
    ["elapsed_ms"] = "f64",
    ["error"] = "str",
    ["version"] = "u64",
    ["uid_bytes"] = "bytes",
    ["port"] = "u16",
    ["svg"] = "str",
    ["label"] = "str",
    ["hash"] = "str",
    ["json"] = "str",
    ["summary"] = "str",
    ["cpu_percent"] = "f32",
    ["ram_used_bytes"] = "u64",
    ["ram_total_bytes"] = "u64",
    ["gpu_util_percent"] = "f32",
    ["vram_total_bytes"] = "u64",
    ["vram_allocated_bytes"] = "u64",
    ["aggregate_rank"] = "u8",
    ["device_index"] = "u8",
    ["name"] = "str",
    ["util_percent"] = "f32",
  },
  metrics = {
    ["rank"] = "u64",
    ["epoch"] = "u64",
    ["avg_loss"] = "f64",
    ["batches_processed"] = "u64",
    ["epoch_ms"] = "f64",
    ["samples_processed"] = "u64",
    ["share_complete_ms"] = "f64",
    ["compute_only_ms"] = "f64",
    ["data_starve_ms"] = "f64",
    ["scalars.key"] = "str",
    ["scalars.value.0"] = "f64",
    ["scalars.value.1"] = "u64",
    ["cpu_percent"] = "f32",
    ["ram_used_bytes"] = "u64",
    ["ram_total_bytes"] = "u64",
    ["gpu_util_percent"] = "f32",
    ["vram_total_bytes"] = "u64",
    ["vram_allocated_bytes"] = "u64",
    ["aggregate_rank"] = "u8",
    ["device_index"] = "u8",
    ["name"] = "str",
    ["util_percent"] = "f32",
  },
  rendezvous = {
    ["dataset_sig"] = "fixed",
    ["global_rank"] = "u32",
    ["host_name"] = "str",
    ["role"] = "enum RendezvousRole",
    ["uid_bytes"] = "bytes",
  },
  join = {
    ["host"] = "str",
    ["local_devices"] = "bytes",
    ["gpus"] = "str",
    ["libtorch"] = "str",
    ["dataset_sig"] = "fixed",
    ["run_id"] = "str",
    ["nccl_version.0"] = "u32",
    ["nccl_version.1"] = "u32",
    ["nccl_version.2"] = "u32",
    ["model_sig"] = "fixed",
    ["ranks"] = "u32",
    ["salt_hex"] = "str",
    ["formation_wait_secs"] = "u64",
    ["reason"] = "str",
    ["envelope_hex"] = "str",
    ["relay_spec_hex"] = "str",
    ["rank"] = "u32",
    ["code"] = "i32",
  },
  relay = {
    ["host"] = "str",
    ["ranks"] = "u32",
    ["model_sigs"] = "fixed",
    ["rank"] = "u32",
  },
}
-- End of what is made.

local flodl = Proto("flodl", "flodl distributed training")

local AUTO = 0
local REVISION_CHOICES = {{1, "as the bytes tell", AUTO}}
local REVISION_NAMES = {}
do
  local names = {}
  for name in pairs(REVISIONS) do names[#names + 1] = name end
  table.sort(names)
  for i, name in ipairs(names) do
    REVISION_CHOICES[i + 1] = {i + 1, name, i}
    REVISION_NAMES[i] = name
  end
end
flodl.prefs.revision = Pref.enum("Revision", AUTO, "Which revision's fields messages have", REVISION_CHOICES, false)
flodl.prefs.ports = Pref.range("TCP ports", "", "Ports that speak flodl whatever their connections start with", 65535)

-- ---------------------------------------------------------------------------------------------------------- fields

local F = {
  magic = ProtoField.uint32("flodl.magic", "magic", base.HEX),
  version = ProtoField.uint32("flodl.version", "version"),
  length = ProtoField.uint32("flodl.length", "length prefix"),
  mac = ProtoField.bytes("flodl.mac", "MAC"),
  rank = ProtoField.uint64("flodl.rank", "rank"),
  kind = ProtoField.uint32("flodl.kind", "kind", base.DEC, ENUMS.MsgKind),
  payload_length = ProtoField.uint32("flodl.payload_length", "payload length"),
  variant = ProtoField.string("flodl.variant", "variant"),
  payload = ProtoField.bytes("flodl.payload", "payload"),
  hello_world = ProtoField.uint32("flodl.hello.world", "world"),
  hello_model_sig = ProtoField.bytes("flodl.hello.model_sig", "model_sig"),
  mux_kind = ProtoField.uint8("flodl.mux.kind", "kind", base.DEC, ENUMS.MuxKind),
  mux_rank = ProtoField.uint32("flodl.mux.rank", "rank"),
  mux_len = ProtoField.uint32("flodl.mux.len", "len"),
  round_n_tensors = ProtoField.uint32("flodl.round.n_tensors", "n_tensors"),
  round_kind = ProtoField.uint8("flodl.round.kind", "kind", base.DEC, ENUMS.RoundKind),
  round_weight = ProtoField.double("flodl.round.weight", "weight"),
  round_dtype = ProtoField.uint8("flodl.round.dtype", "dtype", base.DEC, {[0] = "f32", [1] = "bf16"}),
  round_ndim = ProtoField.uint8("flodl.round.ndim", "ndim"),
  round_dim = ProtoField.uint32("flodl.round.dim", "dim"),
  round_nbytes = ProtoField.uint64("flodl.round.nbytes", "nbytes"),
  round_data = ProtoField.bytes("flodl.round.data", "bytes"),
}
local all = {}
for _, field in pairs(F) do all[#all + 1] = field end

local MAKERS = {
  u8 = ProtoField.uint8, u16 = ProtoField.uint16, u32 = ProtoField.uint32, u64 = ProtoField.uint64,
  i32 = ProtoField.int32, f32 = ProtoField.float, f64 = ProtoField.double,
  str = ProtoField.string, bytes = ProtoField.bytes, fixed = ProtoField.bytes,
}
local VALUES = {}  -- by family and name, the field of each value of the messages
for family, fields in pairs(FIELDS) do
  VALUES[family] = {}
  for name, op in pairs(fields) do
    local abbreviation, enum = "flodl." .. family .. "." .. name, op:match("^enum (.*)")
    local field
    if enum then
      field = ProtoField.uint32(abbreviation, name, base.DEC, ENUMS[enum])
    else
      field = MAKERS[op](abbreviation, name)
    end
    VALUES[family][name] = field
    all[#all + 1] = field
  end
end
flodl.fields = all

local X = {
  malformed = ProtoExpert.new("flodl.malformed", "Malformed", expert.group.MALFORMED, expert.severity.ERROR),
  trailing = ProtoExpert.new("flodl.trailing", "Bytes left over", expert.group.PROTOCOL, expert.severity.WARN),
  limit = ProtoExpert.new("flodl.not_shown", "Not shown", expert.group.COMMENTS_GROUP, expert.severity.NOTE),
}
flodl.experts = {X.malformed, X.trailing, X.limit}

-- -------------------------------------------------------------------------------------------------------- payloads

-- Reads a payload forwards and never beyond its end; what cannot be read ends the dissection with an error.
local Reader = {}
Reader.__index = Reader

function Reader.new(tvb, start, stop, family)
  return setmetatable({tvb = tvb, at = start, stop = stop, family = family, summary = {}}, Reader)
end

function Reader:left() return self.stop - self.at end

function Reader:take(count, what)
  if count > self:left() then
    error({text = string.format("%s needs %d bytes, the payload has %d left", what, count, self:left())})
  end
  local range = self.tvb:range(self.at, count)
  self.at = self.at + count
  return range
end

-- A bincode varint as a UInt64, and the bytes that it is.
local WIDTHS = {[0xFB] = 2, [0xFC] = 4, [0xFD] = 8}
function Reader:varint(what, most)
  local start = self.at
  local first = self:take(1, what):uint()
  local value
  if first < 0xFB then
    value = UInt64(first)
  else
    local width = WIDTHS[first]
    if width == nil or width > most then
      error({text = string.format("%s: 0x%02x starts no number of %d bytes", what, first, most)})
    end
    value = self:take(width, what):le_uint64()
  end
  return value, self.tvb:range(start, self.at - start)
end

-- How many items follow; each takes a byte at least, but for those without any.
function Reader:count(what)
  local value = self:varint(what .. "'s count", 8)
  if value > UInt64(self:left()) then
    error({text = string.format("%s: a count of %s, the payload has %d bytes left", what, tostring(value), self:left())})
  end
  return value:tonumber()
end

local SUMMARY = {rank = true, epoch = true, step_count = true, global_step = true, target_rank = true, host = true}
local INTEGERS = {u16 = 2, u32 = 4, u64 = 8}

function Reader:value(kind, name, tree)
  local op = kind[1]
  local field = VALUES[self.family][name]
  if INTEGERS[op] then
    local value, range = self:varint(name, INTEGERS[op])
    tree:add(field, range, op == "u64" and value or value:tonumber())
    if SUMMARY[name] then self.summary[#self.summary + 1] = name .. "=" .. tostring(value) end
    if name == "rank" or name == "target_rank" or name == "global_rank" then
      tree:add(F.rank, range, value):set_hidden()
    end
  elseif op == "enum" then
    local value, range = self:varint(name, 4)
    tree:add(field, range, value:tonumber())
  elseif op == "i32" then
    local value, range = self:varint(name, 4)
    local raw = value:tonumber()
    tree:add(field, range, raw % 2 == 0 and raw / 2 or -(raw + 1) / 2)
  elseif op == "u8" then
    tree:add(field, self:take(1, name))
  elseif op == "f32" then
    tree:add_le(field, self:take(4, name))
  elseif op == "f64" then
    tree:add_le(field, self:take(8, name))
  elseif op == "fixed" then
    tree:add(field, self:take(kind[2], name))
  elseif op == "str" or op == "bytes" then
    local count = self:count(name)
    if count == 0 then
      tree:add(self.tvb:range(self.at - 1, 1), name .. ": empty")
    else
      local range = self:take(count, name)
      if op == "str" then
        tree:add(field, range, range:string(ENC_UTF_8))
        if SUMMARY[name] then self.summary[#self.summary + 1] = name .. "=" .. range:string(ENC_UTF_8) end
      else
        tree:add(field, range)
      end
    end
  elseif op == "opt" then
    local range = self:take(1, name)
    local tag = range:uint()
    if tag == 0 then
      tree:add(range, name .. ": None")
    elseif tag == 1 then
      self:value(kind[2], name, tree)
    else
      error({text = string.format("%s: an option's tag of %d", name, tag)})
    end
  elseif op == "list" or op == "map" then
    local start = self.at
    local count = self:count(name)
    local branch = tree:add(self.tvb:range(start, self.at - start), string.format("%s: %d items", name, count))
    for _ = 1, count do
      if op == "list" then
        self:value(kind[2], name, branch)
      else
        local item = branch:add(self.tvb:range(self.at, 1), "item")
        self:value(kind[2], name .. ".key", item)
        self:value(kind[3], name .. ".value", item)
      end
    end
  elseif op == "tuple" then
    local branch = tree:add(self.tvb:range(self.at, 1), name)
    for i = 2, #kind do self:value(kind[i], name .. "." .. (i - 2), branch) end
  elseif op == "struct" then
    self:fields(STRUCTS[kind[2]], tree:add(self.tvb:range(self.at, self:left()), name))
  end
end

-- Whether messages have a field or variant that came with this revision. Such fields are a payload's last, so that
-- without a preference the bytes that are left tell.
function Reader:has(since)
  if since == nil then return true end
  if flodl.prefs.revision == AUTO then return self:left() > 0 end
  return since <= REVISION_NAMES[flodl.prefs.revision]
end

function Reader:fields(fields, tree)
  for _, field in ipairs(fields) do
    if self:has(field[3]) then self:value(field[2], field[1], tree) end
  end
end

-- The message of a family in these bytes of the buffer; its name for the column.
local function dissect_payload(tvb, start, stop, family_name, tree)
  local family = FAMILIES[family_name]
  local reader = Reader.new(tvb, start, stop, family.prefix)
  local branch = start < stop and tree:add(tvb:range(start, stop - start), family_name) or tree
  local name = family_name
  local good, problem = pcall(function()
    local fields = family.fields
    if fields == nil then
      local index, range = reader:varint("the variant", 4)
      local variant = family.variants[index:tonumber()]
      if variant == nil then error({text = string.format("unknown variant %s of %s", tostring(index), family_name)}) end
      name = family_name .. " " .. variant.name
      branch:add(F.variant, range, variant.name)
      branch:set_text(name)
      fields = variant.fields
    end
    reader:fields(fields, branch)
  end)
  if not good then
    if type(problem) ~= "table" then error(problem, 0) end
    branch:add_proto_expert_info(X.malformed, problem.text)
  elseif reader:left() > 0 then
    branch:add_proto_expert_info(X.trailing, string.format("%d bytes after the value", reader:left()))
  end
  if #reader.summary > 0 then name = name .. " " .. table.concat(reader.summary, " ") end
  return name
end

local FAMILY_OF_KIND = {}
for name, family in pairs(FAMILIES) do
  if family.kind then FAMILY_OF_KIND[family.kind] = name end
end

-- ---------------------------------------------------------------------------------------------------------- frames

-- Each shows a whole frame at a place of the buffer, and gives its name for the column.

local function dissect_control(tvb, at, size, tree)
  tree:add_le(F.magic, tvb:range(at, 4))
  tree:add_le(F.version, tvb:range(at + 4, 4))
  tree:add(F.mac, tvb:range(at + 8, 8))
  tree:add_le(F.kind, tvb:range(at + 16, 4))
  tree:add_le(F.payload_length, tvb:range(at + 20, 4))
  local kind = tvb:range(at + 16, 4):le_uint()
  local family = FAMILY_OF_KIND[kind]
  local start, stop = at + NUMBERS.CONTROL_HEADER, at + NUMBERS.CONTROL_HEADER + tvb:range(at + 20, 4):le_uint()
  if stop > at + size then
    tree:add_proto_expert_info(X.malformed, "the payload is longer than what holds the frame")
    return "control frame"
  end
  if family == nil then
    if stop > start then tree:add(F.payload, tvb:range(start, stop - start)) end
    return ENUMS.MsgKind[kind] or string.format("kind %d", kind)
  end
  local name = dissect_payload(tvb, start, stop, family, tree)
  if stop < at + size then
    tree:add_proto_expert_info(X.trailing, string.format("%d bytes after the frame", at + size - stop))
  end
  return name
end

local SHOWN_TENSORS = 200

local function dissect_round(tvb, at, size, tree)
  local stop = at + size
  if size < NUMBERS.ROUND_HEADER + NUMBERS.MAC_SIZE then
    tree:add_proto_expert_info(X.malformed, "too short for a round frame")
    return "round"
  end
  tree:add_le(F.magic, tvb:range(at, 4))
  tree:add_le(F.round_n_tensors, tvb:range(at + 4, 4))
  tree:add(F.round_kind, tvb:range(at + 8, 1))
  tree:add_le(F.round_weight, tvb:range(at + 9, 8))
  local count, kind = tvb:range(at + 4, 4):le_uint(), tvb:range(at + 8, 1):uint()
  local weight = tvb:range(at + 9, 8):le_float()
  at = at + NUMBERS.ROUND_HEADER
  stop = stop - NUMBERS.MAC_SIZE
  local name = string.format("round %s weight=%g tensors=%d", ENUMS.RoundKind[kind] or kind, weight, count)
  for i = 0, count - 1 do
    local start = at
    local ndim = at + 2 <= stop and tvb:range(at + 1, 1):uint() or 0
    local head = 2 + 4 * ndim + 8
    if at + head > stop then
      tree:add_proto_expert_info(X.malformed, string.format("the frame ends inside tensor %d of %d", i, count))
      return name
    end
    local nbytes = tvb:range(at + head - 8, 8):le_uint64()
    if nbytes > UInt64(stop - at - head) then
      tree:add_proto_expert_info(X.malformed, string.format("tensor %d has more bytes than the frame", i))
      return name
    end
    at = at + head + nbytes:tonumber()
    if i < SHOWN_TENSORS then
      local branch = tree:add(tvb:range(start, at - start), string.format("tensor %d", i))
      branch:add(F.round_dtype, tvb:range(start, 1))
      branch:add(F.round_ndim, tvb:range(start + 1, 1))
      for d = 0, ndim - 1 do branch:add_le(F.round_dim, tvb:range(start + 2 + 4 * d, 4)) end
      branch:add_le(F.round_nbytes, tvb:range(start + head - 8, 8))
      if at > start + head then branch:add(F.round_data, tvb:range(start + head, at - start - head)) end
    elseif i == SHOWN_TENSORS then
      tree:add_proto_expert_info(X.limit, string.format("%d more tensors", count - i))
    end
  end
  tree:add(F.mac, tvb:range(at, NUMBERS.MAC_SIZE))
  if at < stop then tree:add_proto_expert_info(X.trailing, string.format("%d bytes after the frame", stop - at)) end
  return name
end

local function dissect_mux(tvb, at, size, tree)
  tree:add_le(F.magic, tvb:range(at, 4))
  tree:add_le(F.version, tvb:range(at + 4, 4))
  tree:add(F.mux_kind, tvb:range(at + 8, 1))
  tree:add_le(F.mux_rank, tvb:range(at + 9, 4))
  tree:add_le(F.mux_len, tvb:range(at + 13, 4))
  tree:add(F.mac, tvb:range(at + 17, 8))
  local kind, rank = tvb:range(at + 8, 1):uint(), tvb:range(at + 9, 4):le_uint()
  local start, length = at + NUMBERS.MUX_HEADER, size - NUMBERS.MUX_HEADER
  local title = ENUMS.MuxKind[kind] or string.format("kind %d", kind)
  local inner
  if title == "Control" then
    inner = dissect_payload(tvb, start, at + size, "Relay", tree)
  elseif title == "Data" then
    tree:add(F.rank, tvb:range(at + 9, 4), UInt64(rank)):set_hidden()
    if length >= NUMBERS.CONTROL_HEADER and tvb:range(start, 4):le_uint() == NUMBERS.MAGIC_CONTROL_FRAME then
      inner = dissect_control(tvb, start, length, tree:add(tvb:range(start, length), "ControlFrame"))
    end
    title = string.format("Data(%d)", rank)
  elseif length >= 4 and tvb:range(start, 4):le_uint() == NUMBERS.MAGIC_ROUND then
    inner = dissect_round(tvb, start, length, tree:add(tvb:range(start, length), "RoundFrame"))
  end
  if inner == nil then
    if length > 0 then tree:add(F.payload, tvb:range(start, length)) end
    return title
  end
  return title .. " " .. inner
end

local function dissect_greeting(title)
  return function(tvb, at, size, tree)
    local name = title
    tree:add_le(F.magic, tvb:range(at, 4))
    if size == 4 then return name end
    tree:add_le(F.version, tvb:range(at + 4, 4))
    local signed = name:find("control") and NUMBERS.MAC_SIZE or 0
    if name:find("hello") then
      local range = tvb:range(at + 8, 4)
      tree:add(F.rank, range, UInt64(range:le_uint()))
      tree:add_le(F.hello_world, tvb:range(at + 12, 4))
      if size - signed > 16 then tree:add(F.hello_model_sig, tvb:range(at + 16, size - signed - 16)) end
      name = string.format("%s rank=%d", name:match("^%a+ hello"), range:le_uint())
    end
    if signed > 0 then tree:add(F.mac, tvb:range(at + size - signed, signed)) end
    return name
  end
end

-- ------------------------------------------------------------------------------------------------ where frames end

local function control_size(tvb, at, there)
  if there < NUMBERS.CONTROL_HEADER then return nil end
  local length = tvb:range(at + 20, 4):le_uint()
  return length <= NUMBERS.MAX_PAYLOAD and NUMBERS.CONTROL_HEADER + length or 0
end

local function mux_size(tvb, at, there)
  if there < NUMBERS.MUX_HEADER then return nil end
  local length = tvb:range(at + 13, 4):le_uint()
  return length <= NUMBERS.FRAME_CEILING and NUMBERS.MUX_HEADER + length or 0
end

local function hello_size(tvb, at, there)
  if there < 8 then return nil end
  local version = tvb:range(at + 4, 4):le_uint()
  for _, numbers in pairs(REVISIONS) do
    if numbers.control == version then return numbers.hello end
  end
  return 0
end

local function fixed(size) return function() return size end end

-- What a magic begins: how long it is (nil while the bytes do not tell, 0 if it cannot be) and how it is shown.
local FRAMES = {
  [NUMBERS.MAGIC_CONTROL_FRAME] = {size = control_size, show = dissect_control, title = "ControlFrame"},
  [NUMBERS.MAGIC_MUX] = {size = mux_size, show = dissect_mux, title = "Mux record"},
  [NUMBERS.MAGIC_CONTROL_HELLO] = {size = hello_size, show = dissect_greeting("control hello"), title = "Control hello"},
  [NUMBERS.MAGIC_CONTROL_ACK] = {size = fixed(16), show = dissect_greeting("control ack"), title = "Control ack"},
  [NUMBERS.MAGIC_DATA_HELLO] = {size = fixed(16), show = dissect_greeting("data hello"), title = "Data hello"},
  [NUMBERS.MAGIC_DATA_ACK] = {size = fixed(8), show = dissect_greeting("data ack"), title = "Data ack"},
}
for name, magic in pairs({
  RENDEZVOUS = NUMBERS.MAGIC_CHANNEL_RENDEZVOUS, DATA = NUMBERS.MAGIC_CHANNEL_DATA,
  CONTROL = NUMBERS.MAGIC_CHANNEL_CONTROL, JOIN = NUMBERS.MAGIC_CHANNEL_JOIN,
}) do
  FRAMES[magic] = {size = fixed(4), show = dissect_greeting(name .. " channel"), title = name .. " channel"}
end
-- On a rank's legs, after a length prefix.
local PREFIXED = {
  [NUMBERS.MAGIC_CONTROL_FRAME] = {show = dissect_control, title = "ControlFrame", least = NUMBERS.CONTROL_HEADER},
  [NUMBERS.MAGIC_ROUND] = {show = dissect_round, title = "RoundFrame", least = NUMBERS.ROUND_HEADER},
}

-- The frame that starts at a place of the buffer: how it is shown, its prefix and its size. Nothing where none starts
-- there; true where the bytes do not tell yet.
local function find(tvb, at)
  local there = tvb:len() - at
  if there < 4 then return true end
  local frame = FRAMES[tvb:range(at, 4):le_uint()]
  if frame ~= nil then
    local size = frame.size(tvb, at, there)
    if size == nil then return true end
    if size == 0 then return nil end
    return frame, 0, size
  end
  if there < 8 then return true end
  local size = tvb:range(at, 4):le_uint()
  frame = PREFIXED[tvb:range(at + 4, 4):le_uint()]
  if frame ~= nil and size <= NUMBERS.FRAME_CEILING and size >= frame.least then return frame, 4, size end
  return nil
end

function flodl.dissector(tvb, pinfo, tree)
  -- A segment that was cut when it was captured cannot be put together with the next.
  if tvb:len() ~= tvb:reported_len() then return 0 end
  local at, names = 0, {}
  while at < tvb:len() do
    local frame, prefix, size = find(tvb, at)
    if frame == nil then
      if at == 0 then return 0 end
      tree:add_proto_expert_info(X.malformed, "no frame starts here")
      break
    end
    if frame == true or at + prefix + size > tvb:len() then
      pinfo.desegment_offset = at
      pinfo.desegment_len = frame == true and DESEGMENT_ONE_MORE_SEGMENT or at + prefix + size - tvb:len()
      break
    end
    local branch = tree:add(flodl, tvb:range(at, prefix + size), "flodl " .. frame.title)
    if prefix > 0 then branch:add_le(F.length, tvb:range(at, 4)) end
    names[#names + 1] = frame.show(tvb, at + prefix, size, branch)
    at = at + prefix + size
  end
  if #names > 0 then
    pinfo.cols.protocol = "flodl"
    pinfo.cols.info = table.concat(names, ", ")
  end
  return tvb:len()
end

-- ---------------------------------------------------------------------------------------- how traffic is recognised

local function looks_like(tvb)
  if tvb:len() < 4 then return false end
  if FRAMES[tvb:range(0, 4):le_uint()] ~= nil then return true end
  return tvb:len() >= 8 and PREFIXED[tvb:range(4, 4):le_uint()] ~= nil
end

flodl:register_heuristic("tcp", function(tvb, pinfo, tree)
  if not looks_like(tvb) or tvb:len() ~= tvb:reported_len() then return false end
  pinfo.conversation = flodl
  flodl.dissector(tvb, pinfo, tree)
  return true
end)

local by_port = DissectorTable.get("tcp.port")
local registered = ""
function flodl.prefs_changed()
  if flodl.prefs.ports ~= registered then
    if registered ~= "" then by_port:remove(registered, flodl) end
    registered = flodl.prefs.ports
    if registered ~= "" then by_port:add(registered, flodl) end
  end
end
