//! Which plans there are to look at: sizes, types, architectures, and what is switched off.
//!
//! A kernel's instance follows from a product's size and type and from the GPU's limits. Compiling takes most of the
//! tests' time, so the five sizes are there in the two commonest types, and every other type is there with experts. E4B
//! stands for the sizes without: in BF16, and in Q4_K_M, which stands for Q4_K and Q6_K. A rare type is there once more
//! as a file's other type, for tables and per-layer matrices. Low-bit types and those of checkpoints are there with
//! experts, and one of each kind without: what a kind has in common is its kernels' text. Files of mixed types, the types of keys and values, and
//! switched-off passes are there for sizes in which they make a difference.

use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::measured::H200;
use gemma4c_codegen::passes;
use gemma4c_codegen::target::Target;
use gemma4c_models::synth::{self, Preset, SynthError, Types};
use gemma4c_plan::Seats;
use gemma4c_plan::cuda::KvType;
use gemma4c_runtime::MOST_DRAFTS;

use crate::options::Options;
use crate::pipeline::{Files, Source};

/// The five sizes.
pub const SIZES: [Preset; 5] = [Preset::E2b, Preset::E4b, Preset::Dense12b, Preset::Moe26bA4b, Preset::Dense31b];
/// Types of the common files.
const COMMON: [DType; 5] = [DType::Q8_0, DType::Q4_0, DType::Q4K, DType::Q6K, DType::BF16];
/// Architectures that a few plans stand for, because compiling takes most of the tests' time. The texts of sm_80 and
/// sm_120a are those of sm_89 but for the shared memory and the clusters that attention may have, those of sm_100a and
/// sm_103a are sm_90a's without bf16 copies, and sm_89's are sm_90a's but for the products of prompts: what is left to
/// find out is whether they compile, and with which registers.
pub const FEWEST: [Arch; 5] = [Arch::Sm89, Arch::Sm80, Arch::Sm120a, Arch::Sm100a, Arch::Sm103a];

/// One plan: a model that is only described, and what a user would tell `gemma4c compile`.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub preset: Preset,
    pub types: Types,
    /// With the towers of its size.
    pub has_towers: bool,
    /// With the drafter of its size.
    pub has_drafter: bool,
    pub options: Options,
}

impl Recipe {
    /// For one sequence, with all passes as they are by default, on a GPU with the architecture's limits and the H200's
    /// SMs, so that architectures share texts where they can.
    pub fn new(preset: Preset, types: Types, arch: Arch) -> Recipe {
        let gpu = Target::of_arch(arch).with_multiprocessors(H200.multiprocessors);
        let options = Options { gpus: vec![gpu], ..Options::default() };
        Recipe { preset, types, has_towers: false, has_drafter: false, options }
    }

    fn with(mut self, change: impl FnOnce(&mut Options)) -> Recipe {
        change(&mut self.options);
        self
    }

    /// With keys and values of this type.
    fn with_kv(self, kv: KvType) -> Recipe {
        self.with(|options| options.kv = kv)
    }

    /// Without these passes.
    fn without(self, passes: &[&str]) -> Recipe {
        Recipe { options: self.options.without(passes), ..self }
    }

    /// The same with bf16 copies of the weights.
    pub fn with_copies(self) -> Recipe {
        Recipe { options: self.options.with_copies(), ..self }
    }

    /// What the model's files would say.
    pub fn files(&self) -> Result<Files, SynthError> {
        let projector = self.has_towers.then(|| synth::describe_projector(self.preset, DType::BF16));
        let drafter = self.has_drafter.then(|| synth::describe_drafter(self.preset, self.types.base()));
        Ok(Files {
            text: Source::Described(synth::describe(self.preset, self.types)?),
            adapters: Vec::new(),
            merged: None,
            projector: projector.transpose()?.map(Source::Described),
            drafter: drafter.transpose()?.map(Source::Described),
        })
    }

    /// `e4b q8_0`; what is not a default is said, but for the architecture.
    pub fn name(&self) -> String {
        let Options { kv, sequences, image_tokens, ref enabled, ref disabled, .. } = self.options;
        let mut name = format!("{} {}", self.preset.name(), self.types.name());
        if kv != KvType::F16 {
            name += &format!(", {} cache", kv.name());
        }
        if sequences > 1 {
            name += &format!(", {sequences} sequences");
        }
        if self.has_drafter {
            name += ", a drafter";
        }
        if self.has_towers {
            name += &format!(", pictures of {image_tokens}");
        }
        if let Some(Seats { count, rank }) = self.options.seats {
            name += &format!(", {count} seats of rank {rank}");
        }
        if !enabled.is_empty() {
            name += &format!(", {}", enabled.join(", "));
        }
        match disabled.len() {
            0 => name,
            all if all == every_pass().len() => name + ", no passes",
            _ => name + ", no " + &disabled.join(", no "),
        }
    }
}

/// The plans of the five sizes in these types, with all defaults.
pub fn of_types(arch: Arch, types: &[DType]) -> Vec<Recipe> {
    let of_size = |preset: Preset| types.iter().map(move |dtype| Recipe::new(preset, Types::All(*dtype), arch));
    SIZES.into_iter().flat_map(of_size).collect()
}

/// The plans of an architecture whose launches count: all defaults.
pub fn ordinary(arch: Arch) -> Vec<Recipe> {
    let of = |preset, types| Recipe::new(preset, types, arch);
    if FEWEST.contains(&arch) {
        let mut few = vec![of(Preset::E4b, Types::All(DType::Q8_0))];
        if arch != Arch::Sm103a {
            few.push(of(Preset::Moe26bA4b, Types::All(DType::Q4_0)));
        }
        // The commonest of those without wgmma stands for the types that mix, and for keys and values in 8 bits.
        if arch == Arch::Sm89 {
            few.push(of(Preset::E4b, Types::Q4KMixed));
            few.push(of(Preset::E4b, Types::All(DType::F8)));
            few.extend([KvType::Q8_0, KvType::Fp8].map(|kv| of(Preset::E4b, Types::All(DType::Q4_0)).with_kv(kv)));
        }
        return few;
    }
    let mut all = Vec::new();
    for dtype in DType::ALL {
        let sizes = match dtype {
            DType::Q8_0 | DType::Q4_0 => &SIZES[..],
            DType::BF16 | DType::Q3K | DType::IQ3S | DType::I4 | DType::F8 => &[Preset::E4b, Preset::Moe26bA4b],
            _ => &[Preset::Moe26bA4b],
        };
        all.extend(sizes.iter().map(|preset| of(*preset, Types::All(dtype))));
        if !COMMON.contains(&dtype) && (dtype <= DType::IQ4XS || dtype == DType::NVFP4) {
            all.push(of(Preset::E4b, Types::Q8_0WithTables(dtype)));
        }
    }
    // So that an instance is called after the commonest type that launches it.
    all.sort_by_key(|recipe| {
        COMMON.iter().position(|dtype| recipe.types == Types::All(*dtype)).unwrap_or(COMMON.len())
    });
    all.extend([Preset::E4b, Preset::Moe26bA4b].map(|preset| of(preset, Types::Q4KMixed)));
    all.extend([Preset::E2b, Preset::E4b].map(|preset| of(preset, Types::Q4_0Trained)));
    all.push(of(Preset::Moe26bA4b, Types::Q8_0WithQ6KExperts));
    // Of keys and values in other types, E4B, whose layers share them; in 8 bits, which long contexts are for, the
    // largest as well.
    let with = |kv, size, dtype| of(size, Types::All(dtype)).with_kv(kv);
    for kv in [KvType::BF16, KvType::F32] {
        all.push(with(kv, Preset::E4b, DType::Q8_0));
    }
    for kv in [KvType::Q8_0, KvType::Fp8] {
        all.extend([Preset::E4b, Preset::Dense31b].map(|size| with(kv, size, DType::Q4_0)));
    }
    all
}

/// Plans for several sequences: what they launch besides are the products of several rows, and gathered experts with a
/// dense half (16 rows at most) and without. Plans with a drafter: its own kernels, with groups of tokens and without.
/// Of each, the launches of kernels count that none before it launches.
pub fn with_sequences(arch: Arch) -> Vec<Recipe> {
    let recipe = |preset, dtype| Recipe::new(preset, Types::All(dtype), arch);
    let of = |sequences, preset| recipe(preset, DType::Q4_0).with(|options| options.sequences = sequences);
    let drafting = |preset, dtype| {
        let recipe = recipe(preset, dtype).with(|options| options.drafts = Some(MOST_DRAFTS));
        Recipe { has_drafter: true, ..recipe }
    };
    vec![
        of(8, Preset::Dense12b),
        of(32, Preset::Moe26bA4b),
        drafting(Preset::E4b, DType::Q8_0),
        drafting(Preset::Dense12b, DType::Q4_0),
    ]
}

/// Plans with seats for adapters, all of whose launches count that no plan before launches: products of one row and of
/// several with their adapters, of a size with gates beside its layers and of one without.
pub fn with_seats(arch: Arch) -> Vec<Recipe> {
    let of = |preset, dtype, sequences| {
        Recipe::new(preset, Types::All(dtype), arch).with(|options| {
            options.sequences = sequences;
            options.seats = SEATS;
        })
    };
    match FEWEST.contains(&arch) {
        true => vec![of(Preset::E4b, DType::Q8_0, 1)],
        false => vec![of(Preset::E4b, DType::Q8_0, 2), of(Preset::Dense31b, DType::Q4_0, 1)],
    }
}

/// As `compile --adapters 4` has them.
const SEATS: Option<Seats> = Some(Seats { count: 4, rank: 16 });

/// Plans with towers. Of those with all passes the launches of kernels count that no plan of a text launches, and
/// products over bf16 weights; of the others, of kernels that none before it launches: what fast kernels are held
/// against, and what they fall back to.
pub fn with_towers(arch: Arch) -> Vec<Recipe> {
    let of = |preset, image_tokens, without: &[&str]| {
        let recipe = Recipe::new(preset, Types::All(DType::Q4_0), arch).without(without);
        Recipe { has_towers: true, ..recipe.with(|options| options.image_tokens = image_tokens) }
    };
    let mut all = vec![of(Preset::E4b, 1120, &[]), of(Preset::Dense31b, 280, &[]), of(Preset::Dense12b, 280, &[])];
    if !FEWEST.contains(&arch) {
        all.push(of(Preset::E4b, 280, &["patches"]));
        all.push(of(Preset::E4b, 280, &["int8"]));
    }
    all
}

/// Plans with passes switched off, or on that must be asked for: their launches count where no ordinary plan launches
/// the kernel at all.
pub fn with_passes_off(arch: Arch) -> Vec<Recipe> {
    let of = |preset, dtype, without: &[&str]| Recipe::new(preset, Types::All(dtype), arch).without(without);
    let mut all = Vec::new();
    if FEWEST.contains(&arch) {
        return all;
    }
    if arch.has_wgmma() {
        // Their products are the same for every type that weights have in a file, and each type is widened: one size
        // without experts stands for all.
        all.extend(DType::ALL.map(|dtype| of(Preset::E4b, dtype, &[]).with_copies()));
        all.push(of(Preset::Moe26bA4b, DType::Q4_0, &[]).with_copies());
        // Weights of f32 are not decoded on the way: a product by warps.
        all.push(of(Preset::E4b, DType::F32, &[]));
    }
    // One arithmetic for 1 to 128 rows.
    for (preset, dtype, sequences) in [(Preset::E4b, DType::Q8_0, 128), (Preset::Moe26bA4b, DType::Q4_0, 8)] {
        all.push(of(preset, dtype, &[]).with(|options| {
            options.sequences = sequences;
            options.enabled.push("gemm".into());
        }));
    }
    // Without rounding anywhere: a product for each type that weights have in a file.
    for dtype in DType::ALL {
        all.push(of(Preset::Moe26bA4b, dtype, &["int8"]));
    }
    all.push(of(Preset::E4b, DType::Q8_0, &["int8"]).with(|options| options.seats = SEATS));
    for preset in [Preset::E4b, Preset::Moe26bA4b] {
        all.push(of(preset, DType::Q8_0, &["attention-step"]));
        all.push(of(preset, DType::Q8_0, &every_pass()));
    }
    all
}

fn every_pass() -> Vec<&'static str> {
    passes::optional().collect()
}
