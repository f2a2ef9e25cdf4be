//! The tensors of a text model in a checkpoint, as those of a GGUF file: under its names, each as it lies in a file or
//! made of pieces.
//!
//! What a file must have is known by the config and asked by whoever declares the model; what is here is found and
//! described. A tensor that is not found is not there.

use gemma4c_blocks::DType;
use gemma4c_blocks::recipe::{Float, Recipe};
use gemma4c_plan::{Piece, Span};

use super::config::Shape;
use super::error::{CheckpointError, Fault};
use super::folder::Folder;
use super::forms::{self, Rows};
use super::names::{HEADS, Kind, Name, OF_LAYER, OF_MODEL, PREFIXES};
use super::safetensors::Element;
use crate::gguf::TensorInfo;

/// All of a text model's tensors.
pub fn of_text(folder: &Folder, shape: &Shape) -> Result<Vec<TensorInfo>, CheckpointError> {
    let within = CheckpointError::within(&folder.path);
    let prefix = prefix(folder).ok_or_else(|| within(Fault::Lacks("tensor `…embed_tokens.weight`")))?;
    let mut found = Finder { folder, block: shape.block, tensors: Vec::new() };
    for name in &OF_MODEL {
        match name.gguf {
            "output.weight" if shape.is_tied => {}
            "output.weight" => HEADS.iter().try_for_each(|head| found.add(name, name.gguf, head))?,
            gguf => found.add(name, gguf, &format!("{prefix}{}", name.module))?,
        }
    }
    for layer in 0..shape.layers {
        for name in &OF_LAYER {
            found.add(
                name,
                &format!("blk.{layer}.{}", name.gguf),
                &format!("{prefix}layers.{layer}.{}", name.module),
            )?;
        }
        found.add_experts(layer, &format!("{prefix}layers.{layer}.experts."), shape.experts)?;
    }
    if let Some((values, rotated)) = shape.rope_factors.filter(|(values, _)| *values > 0) {
        let piece = Piece { rows: 1, recipe: Recipe::RopeFactors { rotated }, inputs: Vec::new() };
        let tensor = TensorInfo::made("rope_freqs.weight".into(), &[values.into()], DType::F32, vec![piece]);
        found.tensors.push(tensor);
    }
    Ok(found.tensors)
}

/// What the names of the text model begin with.
pub fn prefix(folder: &Folder) -> Option<&'static str> {
    let is_there = |prefix: &&str| {
        ["weight", "weight_packed"].iter().any(|end| folder.has(&format!("{prefix}embed_tokens.{end}")))
    };
    PREFIXES.into_iter().find(is_there)
}

struct Finder<'a> {
    folder: &'a Folder,
    block: [u32; 2],
    tensors: Vec<TensorInfo>,
}

impl Finder<'_> {
    fn add(&mut self, name: &Name, gguf: &str, stored: &str) -> Result<(), CheckpointError> {
        match name.kind {
            Kind::Vector => self.add_vector(gguf, stored),
            Kind::Matrix | Kind::Router => {
                let module = stored.strip_suffix(".weight").unwrap_or(stored);
                let Some(rows) = forms::find(self.folder, module, self.block)? else { return Ok(()) };
                let only = (name.kind == Kind::Router).then_some(DType::F32);
                self.add_matrix(gguf, rows, only)
            }
        }
    }

    fn add_vector(&mut self, gguf: &str, stored: &str) -> Result<(), CheckpointError> {
        let Some((file, tensor)) = self.folder.tensor(stored) else { return Ok(()) };
        let wrong =
            |problem: String| CheckpointError::within(self.folder.path_of(stored))(Fault::tensor(stored, problem));
        let (element, shape) = (tensor.element, tensor.shape());
        let values = match *shape {
            [] => 1,
            [values] if values > 0 => values,
            _ => return Err(wrong(format!("is {shape:?}, expected a vector"))),
        };
        let span = Span { file, offset: tensor.offset, bytes: tensor.bytes };
        let made = |from| {
            let piece = Piece { rows: 1, recipe: Recipe::Widen { from }, inputs: vec![span] };
            TensorInfo::made(gguf.into(), &[values], DType::F32, vec![piece])
        };
        self.tensors.push(match element {
            Element::F32 => TensorInfo::stored(gguf.into(), &[values], DType::F32, span),
            Element::F16 => made(Float::F16),
            Element::BF16 => made(Float::BF16),
            other => return Err(wrong(format!("is {other}, expected BF16 or F32"))),
        });
        Ok(())
    }

    fn add_matrix(&mut self, gguf: &str, rows: Rows, only: Option<DType>) -> Result<(), CheckpointError> {
        let dims = match rows.stacked {
            Some(matrices) => vec![rows.columns, rows.rows / matrices.max(1), matrices],
            None => vec![rows.columns, rows.rows],
        };
        if dims.contains(&0) {
            return Err(self.fault(&rows, "holds no values"));
        }
        self.tensors.push(match rows.as_stored() {
            Some((dtype, span)) if only.is_none_or(|only| only == dtype) => {
                TensorInfo::stored(gguf.into(), &dims, dtype, span)
            }
            _ => {
                let mut types = rows.types().filter(|dtype| only.is_none_or(|only| only == *dtype));
                let dtype = types.next().ok_or_else(|| self.fault(&rows, "cannot be made f32 exactly"))?;
                TensorInfo::made(gguf.into(), &dims, dtype, vec![rows.piece(dtype)])
            }
        });
        Ok(())
    }

    /// Experts that are stored one by one: gate and up of each become rows of one tensor, as stacked ones are.
    fn add_experts(&mut self, layer: u32, prefix: &str, experts: u32) -> Result<(), CheckpointError> {
        let first = |part: &str| format!("{prefix}0.{part}_proj");
        let is_there = |part: &str| {
            ["weight", "weight_packed"].iter().any(|end| self.folder.has(&format!("{}.{end}", first(part))))
        };
        if experts == 0 || !["gate", "up", "down"].iter().any(|part| is_there(part)) {
            return Ok(());
        }
        for (gguf, parts) in [("ffn_gate_up_exps", &["gate", "up"][..]), ("ffn_down_exps", &["down"])] {
            let mut all = Vec::new();
            for expert in 0..experts {
                for part in parts {
                    let name = format!("{prefix}{expert}.{part}_proj");
                    let rows = forms::find(self.folder, &name, self.block)?;
                    let missing = || Fault::tensor(&format!("{name}.weight"), "is missing");
                    all.push(rows.ok_or_else(|| CheckpointError::within(&self.folder.path)(missing()))?);
                }
            }
            self.add_joined(&format!("blk.{layer}.{gguf}.weight"), &all, experts)?;
        }
        Ok(())
    }

    /// Matrices behind each other as one tensor, in the first type that all of them can be.
    fn add_joined(&mut self, gguf: &str, all: &[Rows], experts: u32) -> Result<(), CheckpointError> {
        let (first, rows) = (&all[0], all.iter().map(|rows| rows.rows).sum::<u64>());
        let each = rows / u64::from(experts);
        let step = all.len() / experts as usize;
        if let Some(odd) = all.iter().enumerate().find(|(at, rows)| {
            rows.columns != first.columns || rows.rows != all[at % step].rows || rows.stacked.is_some()
        }) {
            let problem = format!("is {} rows of {}, other experts' are not", odd.1.rows, odd.1.columns);
            return Err(self.fault(odd.1, problem));
        }
        let shared = first.types().find(|dtype| all.iter().all(|rows| rows.types().any(|other| other == *dtype)));
        let dtype =
            shared.ok_or_else(|| self.fault(first, "and other experts' have no type that holds all of them"))?;
        let pieces = all.iter().map(|rows| rows.piece(dtype)).collect();
        let dims = [first.columns, each, experts.into()];
        self.tensors.push(TensorInfo::made(gguf.into(), &dims, dtype, pieces));
        Ok(())
    }

    fn fault(&self, rows: &Rows, problem: impl Into<String>) -> CheckpointError {
        let path = self.folder.path_of(&format!("{}.weight", rows.name));
        CheckpointError::within(path)(Fault::tensor(&rows.name, problem))
    }
}
