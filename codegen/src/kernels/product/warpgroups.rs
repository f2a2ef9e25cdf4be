//! Products of many rows by warpgroups: what they read weights from, their tiles, and which tile is taken.

use gemma4c_blocks::DType;
use gemma4c_dsl::{DeviceDef, ElementType, Instance, InstanceError};

use crate::arch::Arch;
use crate::kernels::formats;
use crate::kernels::matvec::formats::format;
use crate::target::Target;

use super::decode::decode;
use super::decoding::product_decoding;
use super::fed::product_fed;
use super::team::{decode_of_team, product_team};
use super::tiles::product_tiles;
use super::wgmma::product_wgmma;

/// Values of K in a step: a row of a tile is 128 bytes, as far as the swizzle goes.
const STEP: u32 = 64;

/// Of an H200 that multiplies.
const CLOCKS_A_MICROSECOND: f64 = 1830.0;

/// What weights are read from. Both give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A bf16 copy, or weights that are bf16.
    Copy,
    /// Their planes: decoded on the way.
    Planes(DType),
}

impl Source {
    /// What weights of a type are read from where there is no copy; `None` where they are not decoded on the way.
    pub fn without_copy(dtype: DType) -> Option<Source> {
        match dtype {
            DType::BF16 => Some(Source::Copy),
            DType::F32 => None,
            _ => Some(Source::Planes(dtype)),
        }
    }

    /// What is said of it where a plan tells its reasons.
    pub fn words(&self) -> &'static str {
        match self {
            Source::Copy => "over bf16 weights",
            Source::Planes(_) => "that decode weight planes on the way",
        }
    }

    /// The tiles of its kernel, from the least work to the most.
    pub fn tiles(&self) -> &'static [WgmmaTile] {
        const fn tile(rows: u32, columns: u32) -> WgmmaTile {
            WgmmaTile { rows, columns, team: 0, bulk: false }
        }
        // As many decoders as registers allow beside the sums.
        const fn by_team(rows: u32, team: u32) -> WgmmaTile {
            WgmmaTile { rows, columns: 64, team, bulk: false }
        }
        const fn in_bulk(columns: u32) -> WgmmaTile {
            WgmmaTile { rows: 128, columns, team: 0, bulk: true }
        }
        const OF_COPIES: &[WgmmaTile] = &[
            tile(64, 32),
            tile(64, 64),
            tile(64, 128),
            tile(64, 256),
            tile(128, 96),
            tile(128, 128),
            tile(128, 160),
            tile(128, 256),
            in_bulk(192),
            in_bulk(256),
        ];
        const OF_PLANES: &[WgmmaTile] = &[
            tile(32, 64),
            tile(64, 64),
            tile(128, 64),
            tile(32, 128),
            tile(64, 128),
            tile(128, 128),
            tile(160, 128),
            tile(192, 128),
            tile(256, 128),
            by_team(64, 5),
            by_team(128, 4),
            by_team(256, 2),
        ];
        if *self == Source::Copy { OF_COPIES } else { OF_PLANES }
    }

    /// The tiles of sorted rows that warpgroups decode for, as many as registers allow beside the sums of those that multiply.
    fn fed_tiles(&self) -> &'static [WgmmaTile] {
        const fn fed(rows: u32, team: u32) -> WgmmaTile {
            WgmmaTile { rows, columns: 128, team, bulk: false }
        }
        const FED: &[WgmmaTile] = &[fed(64, 4), fed(192, 2)];
        match self {
            // A load has as many weights as a load of nibbles has.
            Source::Planes(dtype) if format(*dtype).unit == 32 => FED,
            _ => &[],
        }
    }

    /// Whether there are tiles of sorted rows that warpgroups decode for.
    pub fn is_fed(&self) -> bool {
        !self.fed_tiles().is_empty()
    }

    /// Warpgroups of a block that multiply: they have 64 rows of its tile each, or 64 columns.
    fn warpgroups(&self, tile: WgmmaTile) -> u32 {
        if *self == Source::Copy { tile.rows / 64 } else { tile.columns / 64 }
    }

    /// Bytes of a step that lie in shared memory: both operands, or the activations alone.
    fn step_bytes(&self, tile: WgmmaTile) -> u32 {
        let holds_weights = *self == Source::Copy || tile.team > 0;
        let rows = if holds_weights { tile.rows + tile.columns } else { tile.rows };
        rows * STEP * 2
    }

    /// Steps in the ring: as many as there is room for, and no more than help.
    fn stages(&self, tile: WgmmaTile) -> u32 {
        let most = match self {
            Source::Copy => 6,
            Source::Planes(_) if tile.team > 0 => 12,
            Source::Planes(_) => 2 + 2 * Self::depth(tile),
        };
        // A KiB of shared memory of each block is the driver's, and a step's mbarriers are 16 bytes.
        let tables = if let Source::Planes(dtype) = self { decode(*dtype).table_bytes() } else { 0 };
        let bytes = Arch::Sm90a.max_shared_bytes_per_block() / self.resident(tile) - 1024 - 16 * most - tables;
        (bytes / self.step_bytes(tile)).min(most)
    }

    /// Steps that codes of planes are ahead of their products: as many as registers allow.
    fn depth(tile: WgmmaTile) -> u32 {
        // Three blocks of 64 x 64 share an SM: among them they wait for memory as seldom with two.
        if tile.rows > 128 || tile.rows == 64 && tile.columns == 64 { 2 } else { 4 }
    }

    /// Blocks that an SM has at once. Over planes those of few rows have few registers and wait for memory most of the time, so that several share an SM.
    fn resident(&self, tile: WgmmaTile) -> u32 {
        match (self, tile.rows, self.warpgroups(tile)) {
            _ if tile.team > 0 => 1,
            (Source::Planes(_), 32, 1) => 4,
            (Source::Planes(_), 64, 1) => 3,
            (Source::Planes(_), 128, 1) => 2,
            _ => 1,
        }
    }

    /// Clocks of a step of so many blocks of an SM, about. Over bf16 weights the most of what tensor cores, shared memory and L2 need: each warpgroup reads all weights
    /// of the tile, and both operands are written once. An SM multiplies 2048 pairs a clock, reads or writes 128 bytes of its shared memory, and gets some
    /// 48 bytes from L2. Over planes lines through what was measured (docs/ledger.md): decoding takes as long whatever the rows.
    fn step_clocks(&self, tile: WgmmaTile, blocks: u32) -> u32 {
        let warpgroups = self.warpgroups(tile);
        match self {
            Source::Planes(dtype) => {
                let of_bytes = match (tile.team, warpgroups) {
                    (0, 1) => 810 + tile.rows * 12 / 5 + (blocks - 1) * (60 + tile.rows * 5 / 2),
                    (0, _) => (1010 + tile.rows * 11 / 3).max(1300),
                    _ => 300 + tile.rows * 4,
                };
                // A load of nibbles has twice the values. Where the rows take longest, that does not show.
                let shows = format(*dtype).unit == 32 && (tile.team == 0 || tile.rows <= 128);
                if shows { of_bytes * 7 / 8 } else { of_bytes }
            }
            Source::Copy => {
                let products = tile.rows * tile.columns * STEP / 2048;
                let read = warpgroups * (64 + tile.columns) * STEP * 2;
                let clocks = products.max((read + self.step_bytes(tile)) / 128).max(self.step_bytes(tile) / 48);
                // Whoever does not copy multiplies faster, by what was measured (docs/ledger.md).
                if tile.bulk { clocks * 10 / 11 } else { clocks }
            }
        }
    }

    /// Clocks from a tile's last step to the next one's first, about: results are stored.
    fn store_clocks(&self, tile: WgmmaTile) -> u32 {
        if *self == Source::Copy { 0 } else { 55 * tile.rows }
    }
}

/// A block's part of the result. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WgmmaTile {
    pub rows: u32,
    pub columns: u32,
    /// Warpgroups that decode for one that multiplies 64 columns, or for one for each 64 rows of more columns. 0: there is nothing to decode, or each decodes for itself.
    pub team: u32,
    /// Bulk copies bring both operands, and warpgroups do nothing but multiply.
    pub bulk: bool,
}

impl WgmmaTile {
    /// What is said of it where a plan tells its reasons.
    pub fn words(&self) -> String {
        let team = match self.team {
            0 => String::new(),
            team if self.is_fed() && self.rows > 64 => format!(", {team} decode for {} that multiply", self.rows / 64),
            team => format!(", {team} decode for one that multiplies"),
        };
        let bulk = if self.bulk { " by bulk copies" } else { "" };
        format!("tiles of {} x {}{team}{bulk}", self.rows, self.columns)
    }

    /// Warpgroups that decode feed one for each 64 rows.
    pub fn is_fed(&self) -> bool {
        self.team > 0 && self.columns > 64
    }
}

/// A product by warpgroups: everything that decides its instance but the tile. Outputs and the values of a row are launch parameters.
#[derive(Clone, Debug)]
pub struct WgmmaProduct {
    /// What the result is stored as.
    pub out: ElementType,
    /// The matrix holds gates, then what they gate.
    pub geglu: bool,
    /// Rows are pairs of a row and an expert, sorted by expert, of which so many neighbouring ones share a row of x. 0: they
    /// are rows.
    pub pairs: u32,
    /// Applied in order to each value of the result, which is counted over all rows.
    pub epilogue: Vec<&'static DeviceDef>,
    /// What the weights are read from.
    pub source: Source,
    /// x is several matrices, and each has so many columns of the result. 0: it is one.
    pub part_columns: u32,
    /// The values of a row are no multiple of 64, but of 8: over bf16 weights.
    pub ragged: bool,
}

impl WgmmaProduct {
    /// A product of rows that is stored as it is.
    pub fn plain(out: ElementType, source: Source) -> WgmmaProduct {
        WgmmaProduct { out, geglu: false, pairs: 0, epilogue: Vec::new(), source, part_columns: 0, ragged: false }
    }

    /// The tile for `rows` rows, if the kernel can make that product: the one whose waves of blocks take the fewest clocks.
    /// `outputs` are those that are stored.
    pub fn choose(&self, rows: u32, outputs: u32, k: u32, target: &Target) -> Option<WgmmaTile> {
        let tiles = |tile: &WgmmaTile| self.tiles(*tile, rows, outputs);
        let fits = |tile: &WgmmaTile| match tile.bulk {
            // Of one matrix of activations, and where every SM has a tile: with fewer it was not measured.
            true => self.part_columns == 0 && tiles(tile) >= target.multiprocessors,
            false => self.part_columns == 0 || self.part_columns.is_multiple_of(self.columns(*tile)),
        };
        self.fewest_clocks(rows, outputs, k, target, fits, tiles)
    }

    /// The tile for groups of `height` pairs of an expert, of which there are about so many, if the kernel can make that product. Where one of that height is fed, it was
    /// faster than all others (docs/ledger.md).
    pub fn choose_grouped(&self, groups: u32, height: u32, outputs: u32, k: u32, target: &Target) -> Option<WgmmaTile> {
        let is_fed = self.source.fed_tiles().iter().any(|tile| tile.rows == height);
        let fits =
            |tile: &WgmmaTile| tile.rows == height && tile.columns >= 64 && !tile.bulk && tile.is_fed() == is_fed;
        let tiles = |tile: &WgmmaTile| groups * outputs.div_ceil(self.columns(*tile));
        self.fewest_clocks(groups, outputs, k, target, fits, tiles)
    }

    /// Of the tiles that fit, the one whose waves of blocks take the fewest clocks, if the kernel can make the product at all.
    fn fewest_clocks(
        &self,
        rows: u32,
        outputs: u32,
        k: u32,
        target: &Target,
        fits: impl Fn(&WgmmaTile) -> bool,
        tiles: impl Fn(&WgmmaTile) -> u32,
    ) -> Option<WgmmaTile> {
        let ends = if self.ragged && self.source == Source::Copy { 8 } else { STEP };
        let whole = outputs.is_multiple_of(4) && k.is_multiple_of(ends);
        if !target.arch.has_wgmma() || rows == 0 || outputs == 0 || k == 0 || !whole {
            return None;
        }
        let clocks = |tile: &&WgmmaTile| self.clocks(**tile, tiles(tile), k, target);
        let of_sorted_rows = if self.pairs > 0 { self.source.fed_tiles() } else { &[] };
        self.source.tiles().iter().chain(of_sorted_rows).rev().filter(|tile| fits(tile)).min_by_key(clocks).copied()
    }

    /// Clocks that so many tiles take, about: those of two kernels that read the same compare.
    fn clocks(&self, tile: WgmmaTile, tiles: u32, k: u32, target: &Target) -> u64 {
        let each = tiles.div_ceil(target.multiprocessors);
        let blocks = each.min(self.source.resident(tile));
        let of_tile = k.div_ceil(STEP) * self.source.step_clocks(tile, blocks) + self.source.store_clocks(tile);
        u64::from(each.div_ceil(blocks)) * u64::from(of_tile)
    }

    /// Microseconds that a product of rows takes, about, so that it compares with a launch that does something else. The clocks over bf16 weights are the least that there can be, and
    /// those of small tiles that decode do not know how their blocks share an SM: whole prompts reach so much of them (docs/ledger.md).
    pub fn microseconds(&self, tile: WgmmaTile, rows: u32, outputs: u32, k: u32, target: &Target) -> f64 {
        let reached = match self.source {
            Source::Copy => 0.6,
            Source::Planes(_) if tile.columns == 64 && tile.team == 0 => 0.85,
            Source::Planes(_) => 1.0,
        };
        let clocks = self.clocks(tile, self.tiles(tile, rows, outputs), k, target) as f64;
        clocks / reached / CLOCKS_A_MICROSECOND
    }

    /// Rows of the matrix, or of each expert's.
    pub fn matrix_rows(&self, outputs: u32) -> u32 {
        if self.geglu { 2 * outputs } else { outputs }
    }

    /// Columns of the result in a block's part.
    fn columns(&self, tile: WgmmaTile) -> u32 {
        if self.geglu { tile.columns / 2 } else { tile.columns }
    }

    fn tiles(&self, tile: WgmmaTile, rows: u32, outputs: u32) -> u32 {
        rows.div_ceil(tile.rows) * outputs.div_ceil(self.columns(tile))
    }

    /// Blocks for `rows` rows: a tile each, or as many as the SMs have at once.
    pub fn grid(&self, tile: WgmmaTile, rows: u32, outputs: u32, multiprocessors: u32) -> [u32; 3] {
        [self.tiles(tile, rows, outputs).min(multiprocessors * self.source.resident(tile)), 1, 1]
    }

    /// Blocks for at most so many groups.
    pub fn grouped_grid(&self, tile: WgmmaTile, groups: u32, outputs: u32, multiprocessors: u32) -> [u32; 3] {
        let most = multiprocessors * self.source.resident(tile);
        [(groups * outputs.div_ceil(self.columns(tile))).min(most), 1, 1]
    }

    pub fn instance(&self, tile: WgmmaTile) -> Result<Instance, InstanceError> {
        let (warpgroups, stages) = (self.source.warpgroups(tile), self.source.stages(tile));
        match self.source {
            Source::Planes(dtype) if tile.is_fed() => product_fed::Chosen {
                UNIT: format(dtype).unit,
                TEAM: tile.team,
                ROWS: tile.rows,
                COLUMNS: tile.columns,
                STAGES: stages,
                GEGLU: self.geglu,
                PAIRS: self.pairs,
                O: self.out,
                side: format(dtype).side,
                decode: vec![decode_of_team(dtype)],
                epilogue: self.epilogue.clone(),
            }
            .build(),
            Source::Planes(dtype) if tile.team > 0 => product_team::Chosen {
                UNIT: format(dtype).unit,
                TEAM: tile.team,
                ROWS: tile.rows,
                STAGES: stages,
                GEGLU: self.geglu,
                PAIRS: self.pairs,
                O: self.out,
                side: format(dtype).side,
                decode: vec![decode_of_team(dtype)],
                epilogue: self.epilogue.clone(),
            }
            .build(),
            Source::Planes(dtype) => product_decoding::Chosen {
                UNIT: format(dtype).unit,
                // Their scales have 16 bits, two to a step, and their codes are transposed as they lie.
                RAW: matches!(dtype, DType::Q8_0 | DType::Q4_0) || formats::is_centred(dtype),
                BRAIN: formats::is_centred(dtype),
                DEPTH: Source::depth(tile),
                WARPGROUPS: warpgroups,
                ROWS: tile.rows,
                STAGES: stages,
                GEGLU: self.geglu,
                PAIRS: self.pairs,
                O: self.out,
                side: format(dtype).side,
                decode: vec![decode(dtype)],
                epilogue: self.epilogue.clone(),
            }
            .build(),
            Source::Copy if tile.bulk => product_tiles::Chosen {
                COLUMNS: tile.columns,
                STAGES: stages,
                GEGLU: self.geglu,
                O: self.out,
                epilogue: self.epilogue.clone(),
            }
            .build(),
            Source::Copy => product_wgmma::Chosen {
                WARPGROUPS: warpgroups,
                COLUMNS: tile.columns,
                STAGES: stages,
                GEGLU: self.geglu,
                PAIRS: self.pairs,
                SPLIT: self.part_columns > 0,
                RAGGED: self.ragged,
                O: self.out,
                epilogue: self.epilogue.clone(),
            }
            .build(),
        }
    }
}
