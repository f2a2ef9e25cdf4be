//! In which form a checkpoint stores a matrix: told by the tensors that are there under its module's name, and their
//! types. A form that nobody can read exactly is refused by name.

use gemma4c_blocks::DType;
use gemma4c_blocks::recipe::{Float, Recipe, Scales};
use gemma4c_plan::{Piece, Span};

use super::error::{CheckpointError, Fault, shown};
use super::folder::Folder;
use super::safetensors::{Element, Stored};

/// Rows of a matrix as they are stored.
pub struct Rows {
    /// The module's name, for messages.
    pub name: String,
    pub rows: u64,
    pub columns: u64,
    /// How many matrices lie behind each other, where they are stacked.
    pub stacked: Option<u64>,
    recipe: Recipe,
    inputs: Vec<Span>,
    /// Types whose blocks hold exactly what is stored, the best first.
    types: Vec<DType>,
}

impl Rows {
    /// Whether the bytes of the file are already rows of a tensor.
    pub fn as_stored(&self) -> Option<(DType, Span)> {
        match self.recipe {
            Recipe::Widen { from } => Some((from.dtype(), *self.inputs.first()?)),
            _ => None,
        }
    }

    /// Types that it can be, the best first.
    pub fn types(&self) -> impl Iterator<Item = DType> + '_ {
        let is_made = |dtype: &DType| self.piece(*dtype).makes(*dtype, self.columns);
        self.types.iter().copied().filter(is_made)
    }

    /// The rows as a piece of a tensor of that type.
    pub fn piece(&self, dtype: DType) -> Piece {
        let recipe = match self.recipe {
            Recipe::Widen { from } if from.dtype() == dtype => Recipe::Copy,
            other => other,
        };
        Piece { rows: self.rows, recipe, inputs: self.inputs.clone() }
    }
}

/// Endings of tensors that are for engines which quantise activations or keys and values.
pub const IGNORED: [&str; 7] = [
    ".input_scale",
    ".input_global_scale",
    ".output_scale",
    ".input_zero_point",
    ".output_zero_point",
    ".k_scale",
    ".v_scale",
];

/// Endings of tensors in forms that are not read, and what they are.
const REFUSED: [(&str, &str); 5] = [
    (".qweight", "GPTQ or AutoAWQ tensors, which compressed-tensors replaces"),
    (".weight_g_idx", "columns in another order (actorder `group`)"),
    (".absmax", "bitsandbytes tensors"),
    (".weight.absmax", "bitsandbytes tensors"),
    (".bias", "a bias, which Gemma 4 has not"),
];

/// Finds a module's matrix: `name` without the ending `.weight`. `None` where there is nothing of it. `block` is the
/// rows and columns that have a scale together where scales are for blocks.
pub fn find(folder: &Folder, name: &str, block: [u32; 2]) -> Result<Option<Rows>, CheckpointError> {
    let finder = Finder { folder, name, block };
    finder.find().map_err(CheckpointError::within(folder.path_of(&finder.first())))
}

struct Finder<'a> {
    folder: &'a Folder,
    name: &'a str,
    block: [u32; 2],
}

/// A tensor of a checkpoint, and the index of its file.
#[derive(Clone, Copy)]
struct Found<'a> {
    file: u32,
    tensor: &'a Stored,
}

impl Found<'_> {
    fn span(&self) -> Span {
        Span { file: self.file, offset: self.tensor.offset, bytes: self.tensor.bytes }
    }
}

impl<'a> Finder<'a> {
    /// Of the module's tensors, one whose file a fault is told of.
    fn first(&self) -> String {
        let endings = [".weight", ".weight_packed", ""];
        let names = endings.map(|ending| format!("{}{ending}", self.name));
        names.into_iter().find(|name| self.folder.has(name)).unwrap_or_default()
    }

    fn get(&self, ending: &str) -> Option<Found<'a>> {
        let (file, tensor) = self.folder.tensor(&format!("{}{ending}", self.name))?;
        Some(Found { file, tensor })
    }

    fn need(&self, ending: &str) -> Result<Found<'a>, Fault> {
        self.get(ending).ok_or_else(|| Fault::tensor(&format!("{}{ending}", self.name), "is missing"))
    }

    fn find(&self) -> Result<Option<Rows>, Fault> {
        if let Some((ending, what)) = REFUSED.iter().find(|(ending, _)| self.get(ending).is_some()) {
            return Err(Fault::unsupported(format!("{}{ending}", shown(self.name)), *what));
        }
        if let Some(packed) = self.get(".weight_packed") {
            return match packed.tensor.element {
                Element::U8 => self.nvfp4(packed, ".weight_global_scale", true).map(Some),
                Element::I32 => self.integers(packed).map(Some),
                other => Err(Fault::tensor(&packed.tensor.name, format!("is {other}, expected I32 or U8"))),
            };
        }
        let Some(weight) = self.get(".weight").or_else(|| self.get("")) else { return Ok(None) };
        match weight.tensor.element {
            Element::F32 => self.plain(weight, Float::F32),
            Element::F16 => self.plain(weight, Float::F16),
            Element::BF16 => self.plain(weight, Float::BF16),
            Element::E4M3 => self.coded(weight, |scales| Recipe::Fp8 { scales }),
            Element::I8 => self.coded(weight, |scales| Recipe::Bytes { scales }),
            Element::U8 => self.nvfp4(weight, ".weight_scale_2", false),
            other => Err(Fault::tensor(&weight.tensor.name, format!("is {other}, expected BF16 or a quantised type"))),
        }
        .map(Some)
    }

    fn rows(&self, [rows, columns]: [u64; 2], recipe: Recipe, inputs: Vec<Span>, types: Vec<DType>) -> Rows {
        Rows { name: self.name.into(), rows, columns, stacked: None, recipe, inputs, types }
    }

    fn plain(&self, weight: Found<'a>, from: Float) -> Result<Rows, Fault> {
        let types = vec![from.dtype(), DType::F32];
        let recipe = Recipe::Widen { from };
        Ok(match *weight.tensor.shape() {
            [matrices, rows, columns] => {
                let all = matrices.saturating_mul(rows);
                Rows { stacked: Some(matrices), ..self.rows([all, columns], recipe, vec![weight.span()], types) }
            }
            _ => self.rows(matrix(weight.tensor)?, recipe, vec![weight.span()], types),
        })
    }

    /// Integers in words; the module says its shape, from which their bits follow.
    fn integers(&self, packed: Found<'a>) -> Result<Rows, Fault> {
        let said = self.need(".weight_shape")?;
        let shape = self.shape_of(said)?;
        let [rows, words] = matrix(packed.tensor)?;
        let bits = [2u8, 4, 8].into_iter().find(|bits| shape[1].div_ceil(32 / u64::from(*bits)) == words);
        let (Some(bits), true) = (bits, shape[0] == rows) else {
            let problem = format!("is {:?}, which holds no integers of 2, 4 or 8 bits of {shape:?}", [rows, words]);
            return Err(Fault::tensor(&packed.tensor.name, problem));
        };
        let scale = self.need(".weight_scale")?;
        let scales = self.scales(scale, shape)?;
        let zeros = self.get(".weight_zero_point");
        let mut inputs = vec![packed.span(), scale.span()];
        if let Some(zeros) = zeros {
            self.expect(zeros, Element::I32)?;
            inputs.push(zeros.span());
        }
        let types = self.types_of_integers(bits, zeros.is_some(), scale);
        let recipe = Recipe::Integers { bits, has_zeros: zeros.is_some(), scales };
        self.checked(self.rows(shape, recipe, inputs, types))
    }

    /// Rows of bytes with scales.
    fn coded(&self, weight: Found<'a>, recipe: impl Fn(Scales) -> Recipe) -> Result<Rows, Fault> {
        let shape = matrix(weight.tensor)?;
        let scale = self.get(".weight_scale").or_else(|| self.get(".weight_scale_inv"));
        let scale = scale.ok_or_else(|| Fault::tensor(&format!("{}.weight_scale", self.name), "is missing"))?;
        let recipe = recipe(self.scales(scale, shape)?);
        let types = match recipe {
            Recipe::Bytes { .. } => self.types_of_integers(8, false, scale),
            _ => self.types_of_fp8(scale),
        };
        self.checked(self.rows(shape, recipe, vec![weight.span(), scale.span()], types))
    }

    fn nvfp4(&self, codes: Found<'a>, of_all: &str, is_divisor: bool) -> Result<Rows, Fault> {
        self.expect(codes, Element::U8)?;
        let [rows, bytes] = matrix(codes.tensor)?;
        let (scale, all) = (self.need(".weight_scale")?, self.need(of_all)?);
        self.expect(scale, Element::E4M3)?;
        self.expect(all, Element::F32)?;
        let factor = match self.folder.bytes(all.file, all.tensor) {
            [a, b, c, d] => f32::from_le_bytes([*a, *b, *c, *d]),
            _ => return Err(Fault::tensor(&all.tensor.name, format!("is {:?}, expected one", all.tensor.shape()))),
        };
        if !(factor.is_finite() && factor > 0.0 && (1.0 / factor).is_finite()) {
            let problem = format!("is {factor}: a scale is a positive number, and this weight was never calibrated");
            return Err(Fault::tensor(&all.tensor.name, problem));
        }
        let shape = [rows, bytes.saturating_mul(2)];
        let inputs = vec![codes.span(), scale.span(), all.span()];
        self.checked(self.rows(shape, Recipe::Nvfp4 { is_divisor }, inputs, vec![DType::NVFP4, DType::F32]))
    }

    /// Which values have which scale, by the shape of the scales.
    fn scales(&self, scale: Found<'a>, [rows, columns]: [u64; 2]) -> Result<Scales, Fault> {
        let float = match scale.tensor.element {
            Element::F32 => Float::F32,
            Element::F16 => Float::F16,
            Element::BF16 => Float::BF16,
            other => return Err(Fault::tensor(&scale.tensor.name, format!("is {other}, expected BF16 or F32"))),
        };
        let shape = scale.tensor.shape();
        let wrong = || {
            let problem = format!("is {shape:?}, which are no scales of a matrix of {:?}", [rows, columns]);
            Fault::tensor(&scale.tensor.name, problem)
        };
        let all = |of: u64| u32::try_from(of).map_err(|_| wrong());
        let (of_rows, of_columns) = match *shape {
            [] | [1] => (1, 1),
            [of_rows] => (of_rows, 1),
            [of_rows, of_columns] => (of_rows, of_columns),
            _ => return Err(wrong()),
        };
        if of_rows == 0 || of_columns == 0 {
            return Err(wrong());
        }
        let [block_rows, block_columns] = self.block.map(u64::from);
        let is_blocks =
            of_rows == rows.div_ceil(block_rows.max(1)) && of_columns == columns.div_ceil(block_columns.max(1));
        let (each_rows, each_columns) = match (of_rows, of_columns) {
            (1, 1) => (rows, columns),
            _ if of_rows == rows && columns.is_multiple_of(of_columns) => (1, columns / of_columns),
            _ if is_blocks => (block_rows, block_columns),
            _ => return Err(wrong()),
        };
        Ok(Scales { float, rows: all(each_rows)?, columns: all(each_columns)? })
    }

    /// Whether the scales are all numbers that bf16 holds.
    fn are_bf16(&self, scale: Found<'a>) -> bool {
        let bytes = self.folder.bytes(scale.file, scale.tensor);
        match scale.tensor.element {
            Element::BF16 => true,
            Element::F32 => bytes.as_chunks::<4>().0.iter().all(|value| value[..2] == [0, 0]),
            _ => false,
        }
    }

    fn types_of_integers(&self, bits: u8, has_zeros: bool, scale: Found<'a>) -> Vec<DType> {
        let block = match (bits, has_zeros) {
            (2, false) => Some(DType::I2),
            (4, false) => Some(DType::I4),
            (4, true) => Some(DType::I4Z),
            (8, false) => Some(DType::I8),
            _ => None,
        };
        block.filter(|_| self.are_bf16(scale)).into_iter().chain([DType::F32]).collect()
    }

    fn types_of_fp8(&self, scale: Found<'a>) -> Vec<DType> {
        let narrow = self.are_bf16(scale).then_some(DType::F8);
        narrow.into_iter().chain([DType::F8S, DType::F32]).collect()
    }

    /// The two numbers of a `weight_shape`.
    fn shape_of(&self, said: Found<'a>) -> Result<[u64; 2], Fault> {
        self.expect(said, Element::I64)?;
        let numbers = self.folder.bytes(said.file, said.tensor).as_chunks::<8>().0;
        match numbers.iter().map(|number| i64::from_le_bytes(*number)).collect::<Vec<_>>()[..] {
            [rows @ 1..=MOST, columns @ 1..=MOST] => Ok([rows as u64, columns as u64]),
            _ => Err(Fault::tensor(&said.tensor.name, "does not hold the two sizes of a matrix")),
        }
    }

    fn expect(&self, found: Found<'a>, element: Element) -> Result<(), Fault> {
        match found.tensor.element == element {
            true => Ok(()),
            false => Err(Fault::tensor(&found.tensor.name, format!("is {}, expected {element}", found.tensor.element))),
        }
    }

    /// Its tensors are as long as its shape says.
    fn checked(&self, rows: Rows) -> Result<Rows, Fault> {
        if rows.types().next().is_some() {
            return Ok(rows);
        }
        let [rows, columns] = [rows.rows, rows.columns];
        let problem = format!("and its scales are no matrix of {rows} rows of {columns} in any form that is read");
        Err(Fault::tensor(&self.first(), problem))
    }
}

/// No size of a matrix is larger.
const MOST: i64 = 1 << 32;

/// The rows and columns of a matrix.
fn matrix(tensor: &Stored) -> Result<[u64; 2], Fault> {
    match *tensor.shape() {
        [rows, columns] if rows > 0 && columns > 0 => Ok([rows, columns]),
        _ => Err(Fault::tensor(&tensor.name, format!("is {:?}, expected a matrix", tensor.shape()))),
    }
}
