//! The table of kernel families: what each is for, its kernels, and the cases that say what they must do.
//!
//! A family's row is all that lists, snapshots and checks its kernels. It stands above kernels and cases, so that kernels know nothing of
//! the cases that are made of them.

use std::sync::{LazyLock, OnceLock};

use gemma4c_dsl::harness::Case;
use gemma4c_dsl::{DeviceDef, Instance, KernelDef, StructDef};

use crate::nvrtc::Source;
use crate::{cases, kernels};

/// Kernels that do one job, and everything that is known of them.
#[derive(Debug)]
pub struct Family {
    pub name: &'static str,
    /// One line: what the job is.
    pub about: &'static str,
    pub kernels: &'static [&'static KernelDef],
    /// What the kernels must do, for every executor.
    pub cases: fn() -> Vec<Case>,
}

/// The whole library, in the order of a layer.
pub static FAMILIES: &[Family] = &[
    Family {
        name: "probe",
        about: "what this GPU's memory gives at best",
        kernels: &[kernels::probe::read_all::DEF],
        cases: cases::probe::cases,
    },
    Family {
        name: "gather",
        about: "embedding rows: gathered by token, decoded, scaled",
        kernels: &[kernels::gather::gather::DEF],
        cases: cases::gather::cases,
    },
    Family {
        name: "repack",
        about: "GGUF blocks to planes of codes and scales, once, at load",
        kernels: &[
            kernels::repack::repack_plane::DEF,
            kernels::repack::repack_halves::DEF,
            kernels::repack::repack_bytes::DEF,
            kernels::repack::repack_quads::DEF,
            kernels::repack::repack_packed6::DEF,
            kernels::repack::repack_split6::DEF,
            kernels::repack::repack_words::DEF,
        ],
        cases: cases::repack::cases,
    },
    Family {
        name: "quantise",
        about: "activations to int8, 32 to a scale",
        kernels: &[kernels::quantise::quantise::DEF],
        cases: cases::quantise::cases,
    },
    Family {
        name: "matvec",
        about: "decode's matrix-vector products over repacked weights, with prologue and epilogue",
        kernels: &[kernels::matvec::matvec::DEF],
        cases: cases::matvec::cases,
    },
    Family {
        name: "rows",
        about: "products of several sequences' rows, each with the bits it has alone",
        kernels: &[
            kernels::rows::prepare::prepare_rows::DEF,
            kernels::rows::cores::rows_matvec::DEF,
            kernels::rows::mma::rows_mma::DEF,
            kernels::rows::stream::rows_stream::DEF,
            kernels::rows::tiles::rows_tiles::DEF,
            kernels::rows::steps::rows_tiles_in_steps::DEF,
        ],
        cases: || [cases::rows::cases(), cases::rows::mixture::cases()].concat(),
    },
    Family {
        name: "norm",
        about: "RMS norms of rows, with residual, layer scale, next norm and int8 outputs",
        kernels: &[kernels::norm::rms_norm::DEF, kernels::norm::residual_norm::DEF, kernels::norm::rms_norm_plain::DEF],
        cases: cases::norm::cases,
    },
    Family {
        name: "heads",
        about: "head norms of Q, K and V, RoPE, and the store into the cache",
        kernels: &[kernels::heads::heads::DEF],
        cases: cases::heads::cases,
    },
    Family {
        name: "geglu",
        about: "gelu(gate) * up over rows",
        kernels: &[kernels::geglu::geglu::DEF],
        cases: cases::geglu::cases,
    },
    Family {
        name: "per_layer",
        about: "per-layer embeddings: the inputs of all layers at once",
        kernels: &[kernels::per_layer::per_layer_inputs::DEF, kernels::per_layer::step::per_layer_step::DEF],
        cases: cases::per_layer::cases,
    },
    Family {
        name: "sample",
        about: "argmax, and sampling by temperature, top-k and top-p",
        kernels: &[kernels::sample::pick::DEF],
        cases: cases::sample::cases,
    },
    Family {
        name: "draft",
        about: "a drafter's own: the state it starts from, the tokens it looks at, their scores, its choice, and what is kept of a round",
        kernels: &[
            kernels::draft::enter_draft::DEF,
            kernels::draft::closest_groups::DEF,
            kernels::draft::token_scores::DEF,
            kernels::draft::draft_token::DEF,
            kernels::draft::accept_drafts::DEF,
        ],
        cases: cases::draft::cases,
    },
    Family {
        name: "gemm",
        about: "products of 1 to 128 rows over repacked weights, with 16-bit operands: a row has the same bits in any batch",
        kernels: &[kernels::gemm::warps::gemm::DEF, kernels::gemm::warpgroups::gemm_warpgroups::DEF],
        cases: cases::gemm::cases,
    },
    Family {
        name: "product",
        about: "prefill's matrix products on bf16 tensor cores: over repacked weights, and over bf16 weights",
        kernels: &[
            kernels::product::product::DEF,
            kernels::product::round_rows::DEF,
            kernels::product::wgmma::product_wgmma::DEF,
            kernels::product::tiles::product_tiles::DEF,
            kernels::product::decoding::product_decoding::DEF,
            kernels::product::team::product_team::DEF,
            kernels::product::fed::product_fed::DEF,
            kernels::product::widen::widen::DEF,
        ],
        cases: cases::product::cases,
    },
    Family {
        name: "moe",
        about: "mixture of experts: the router, and the products of the experts it chose",
        kernels: &[
            kernels::moe::router::route::DEF,
            kernels::moe::gate_up::expert_geglu::DEF,
            kernels::moe::down::expert_down::DEF,
            kernels::moe::gathered::gate_up::gathered_geglu::DEF,
            kernels::moe::gathered::down::gathered_down::DEF,
            kernels::moe::group::group_pairs::DEF,
        ],
        cases: || [cases::moe::cases(), cases::gathered::cases(), cases::grouped::sorts()].concat(),
    },
    Family {
        name: "attention",
        about: "attention over the cache: for few rows, for many rows, and plainly",
        kernels: &[
            kernels::attention::plain::attention_plain::DEF,
            kernels::attention::decode::attention_decode::DEF,
            kernels::attention::combine::attention_combine::DEF,
            kernels::attention::combine::attention_combine_int8::DEF,
            kernels::attention::step::attention_step::DEF,
            kernels::attention::rows::attention_rows::DEF,
            kernels::attention::flash::attention_flash::DEF,
            kernels::attention::warpgroups::attention_warpgroups::DEF,
            kernels::attention::keep::keep_rows::DEF,
        ],
        cases: || {
            use cases::attention::{self, company, packed, stage, step};
            let few_rows = [attention::cases(), step::cases(), company::cases(), stage::cases()];
            [&few_rows.concat()[..], &packed::cases(), &attention::cases_of_many_rows()].concat()
        },
    },
    Family {
        name: "tower",
        about: "what a tower's patches need besides: their grid, attention of all to all, soft tokens in a prompt",
        kernels: &[
            kernels::tower::axis_rows::DEF,
            kernels::tower::grid_rope::DEF,
            kernels::tower::grid_mean::DEF,
            kernels::tower::sub_mean::DEF,
            kernels::tower::full_attention::DEF,
            kernels::tower::flash::attention_patches::DEF,
            kernels::tower::heads::patch_heads::DEF,
            kernels::tower::warpgroups::patch_attention::DEF,
            kernels::tower::sound::halving_conv::DEF,
            kernels::tower::sound::causal_conv::DEF,
            kernels::tower::sound::near_attention::DEF,
            kernels::tower::clipped::clipped_norm::DEF,
            kernels::tower::clipped::clipped_geglu::DEF,
            kernels::tower::place_soft::DEF,
        ],
        cases: || [cases::tower::cases(), cases::tower_fast::cases(), cases::sound::cases()].concat(),
    },
    Family {
        name: "adapter",
        about: "the halves of an adapter's pair, of one for all rows or of each row's seat",
        kernels: &[
            kernels::adapter::narrow_rows::DEF,
            kernels::adapter::widen_rows::DEF,
            kernels::adapter::narrow_tiles::DEF,
            kernels::adapter::narrow_decoded::DEF,
        ],
        cases: cases::adapter::cases,
    },
    Family {
        name: "plain",
        about: "every operation of a graph on its own, in f32, weights as they lie in the file",
        kernels: &[
            kernels::plain::map::map::DEF,
            kernels::plain::rows::take_row::DEF,
            kernels::plain::rows::kv_store::DEF,
            kernels::plain::rope::rope::DEF,
            kernels::plain::product::matmul_exact::DEF,
            kernels::plain::experts::top_k_softmax::DEF,
            kernels::plain::experts::expert_product::DEF,
            kernels::plain::experts::expert_sum::DEF,
        ],
        cases: cases::plain::cases,
    },
];

/// An instance with its name for people: `read_all`, `4 loads ahead`.
#[derive(Clone, Debug)]
pub struct NamedInstance {
    pub label: String,
    pub instance: Instance,
    /// How many of the plans that were looked at launch it; 0 for one that is there for its case.
    pub plans: usize,
}

impl NamedInstance {
    /// What NVRTC compiles.
    pub fn source(&self) -> Source {
        kernels::source(&self.instance)
    }

    /// Part of the chain that makes one token, where a spilled register costs every token of every user. Such kernels, and
    /// no others, start before their predecessor ends.
    pub fn is_decode(&self) -> bool {
        self.instance.def.launch.dependent
    }
}

/// What the cases of each family launch. Cases are made with what must come out of them, which takes long: once is enough.
static OF_CASES: LazyLock<Vec<OnceLock<Vec<Instance>>>> =
    LazyLock::new(|| FAMILIES.iter().map(|_| OnceLock::new()).collect());

/// What the cases of all families launch.
fn of_all_cases() -> impl Iterator<Item = &'static Instance> {
    FAMILIES.iter().flat_map(Family::of_cases)
}

impl Family {
    /// What the cases launch, in their order.
    pub fn of_cases(&self) -> &'static [Instance] {
        let at = FAMILIES.iter().position(|family| family.name == self.name).expect("a family of the table");
        OF_CASES[at].get_or_init(|| (self.cases)().into_iter().map(|case| case.instance).collect())
    }

    /// The instances of the cases, each once, under what they choose.
    pub fn instances_of_cases(&self) -> Vec<NamedInstance> {
        let mut found: Vec<NamedInstance> = Vec::new();
        for instance in self.of_cases() {
            let shown = instance.to_string();
            let chosen = shown.strip_prefix(instance.def.name).unwrap_or(&shown);
            let label = chosen.trim_matches(['[', ']']).to_owned();
            if !found.iter().any(|known| known.instance.def == instance.def && known.label == label) {
                found.push(NamedInstance { label, instance: instance.clone(), plans: 0 });
            }
        }
        found
    }
}

/// The family of that name.
pub fn family(name: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.name == name)
}

/// The kernel of that name, and its family.
pub fn kernel(name: &str) -> Option<(&'static Family, &'static KernelDef)> {
    FAMILIES.iter().find_map(|family| Some((family, *family.kernels.iter().find(|kernel| kernel.name == name)?)))
}

/// The device functions that any case reaches, each once, by name.
pub fn device_functions() -> Vec<&'static DeviceDef> {
    let mut found: Vec<&'static DeviceDef> = of_all_cases().flat_map(|instance| instance.devices()).collect();
    found.sort_by_key(|device| device.name);
    found.dedup_by_key(|device| device.name);
    found
}

/// The structs that any case reaches, each once, by name.
pub fn structs() -> Vec<&'static StructDef> {
    let mut found: Vec<&'static StructDef> = of_all_cases().flat_map(|instance| instance.structs()).collect();
    found.sort_by_key(|def| def.name);
    found.dedup_by_key(|def| def.name);
    found
}
