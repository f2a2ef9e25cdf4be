//! How a product is spread over a GPU: a pure function of its type and shape, so that results never depend on load.
//!
//! The rule is measured, by whole plans of all five sizes on an H200, where a token is a chain of some 300 kernels. What
//! counts there: every block reads all activations and computes their norms, so there is one an SM; many warps,
//! because one alone waits for its own sums; and equal work for all. Where that leaves a choice, whole rows are on their way, and warps have whole
//! chunks to norm. The numbers of warps come from [`crate::measured`]; what else was tried is in docs/ledger.md.

use super::formats::format;
use super::product::{LaunchShape, Product};
use crate::measured::{H200, Question};
use crate::target::Target;

/// Warps of a block, at least: fewer would take too long over the activations.
const FEWEST_WARPS: u32 = H200.fastest(Question::FewestWarps);
/// The same where there is less to do: a warp for each 128 activations that are normed, or activations that are ready and one or two rows a warp. E2B Q4_0, q, k, v with 20 and 12 warps: 1,200 and 1,209 tokens a second;
/// E2B Q8_0, down and global output projections with 20, 16 and 12: 957, 989 and 1,004; 12B Q4_0, down with 20, 16 and 14, which are two rounds: 437, 441 and 415.
const FEWEST_OF_FEW: u32 = 12;
/// Warps of a block whose grid does not cover the matrix at once, and at most where it does.
const MANY_WARPS: [u32; 3] = [H200.fastest(Question::Warps), 16, 12];
/// Where none of these fills its rounds, any number from this on may.
const FEWEST_IN_ROUNDS: u32 = 10;
/// How full rounds are at least: measured on E2B, E4B, 12B and 31B, more warps are better, unless a tenth of them is idle.
const FULL_ROUNDS: f32 = 0.9;
/// The share of its time that a busy SM has work: more makes no difference.
const FULL: f32 = 0.97;
/// Rows of a lane, and units of each on their way: many rows share what they read of the activations, few make finer tasks.
const ROWS_AND_DEPTH: [(u32, u32); 3] = [(4, 3), (2, 6), (1, 10)];
/// How full rounds are at least where warps have a whole number of the chunks that are normed: such blocks norm without asking which places are there. q, k, v of 26B-A4B Q4_0 with 11 warps and 16: 900 and 893 tokens a second;
/// of 31B Q4_0 (12 layers) with two rows and 14 warps, and four rows and 16: 863 and 860.
const FULL_OF_CHUNKS: f32 = 0.88;
/// Registers of an SM, those of a lane that are not for units on their way, and the most that are: of four rows, and of two rows that are on their way as a whole behind a norm.
const REGISTERS: (u32, u32, u32) = (65536, 50, 60);
/// Gate and up of 31B Q4_0 (12 layers) with 6 units of two rows, and 3 of four: 834 and 829 tokens a second. The 11 units of Q8_0 would spill.
const MOST_OF_WHOLE: u32 = 100;
/// A product of so many rounds is long: the norm before it takes little of its time.
const LONG_ROUNDS: u32 = 8;
/// Units of a lane's rows, at most, that a long product has on their way as whole rows, and bytes to an SM. Whole rows against the rule before, tokens a second: 31B Q4_0 (12 layers) 842 and 829, 12B Q4_0 (12 layers)
/// 1,489 and 1,475, 26B-A4B Q4_0 841.5 and 838.9, E4B Q8_0 570.0 and 566.5.
const WHOLE: (u32, u32) = (10, 64 << 10);
/// The same units where neighbouring lanes are joined, which two rows share: the head of 26B-A4B Q8_0 (12 layers) with two rows and 12 warps, and one row and 20: 1,496 and 1,467 tokens a second.
const WHOLE_OF_JOINED: u32 = 12;
/// Units of a lane's four rows of a pair, at most, before two rows are on their way as a whole instead: gate and up of 12B Q4_0 (12 layers) with 4 units of two rows, and 2 of four: 1,565 and 1,552 tokens a second.
const WHOLE_OF_FOUR: u32 = 12;
/// Steps of a row, at most, that joined lanes have two of where that is one round: output projections of 26B-A4B Q8_0 (12 layers) so, and with a row a warp: 1,519 and 1,495 tokens a second. Down of E4B Q8_0, of 20 steps, loses by it.
const LONGEST_OF_ONE_ROUND: u32 = 16;
/// Seconds of the memory's time up to which a product is short: all of it is on its way while it waits for its activations. The first down products of E2B Q8_0 with all 12 units of two rows on their way, and with 6: 1,061 and
/// 1,051 tokens a second; the later ones of Q4_0, whose rows are as long, with two rows on 64 SMs, and with one on 128: 1,332 and 1,354.
const SHORT: f64 = 2.6e-6;
/// Of ten SMs, how many a short product takes: on the others its successor starts to read while the product still waits. The output projection of E4B Q8_0 on 128 SMs: 579 tokens a second, on 107,
/// 92, 80 and 64: 593, 603, 597 and 595; Q4_0 on 128, 92, 80 and 64: 751, 789, 792 and 784.
const TAKEN_BY_SHORT: u32 = 7;
/// Bytes on their way to an SM beyond which more do not help: rows that share activations do.
const ENOUGH_BYTES: u32 = 56 << 10;

/// Seconds of the memory's time that SMs without a group leave unused, from which on the outputs behind the last full round are spread over all SMs. Measured on the H200: E4B Q8_0 gains at 2.4 us and
/// 31B Q4_0 at 4.5; 12B Q4_0 gains nothing at 1.4 and E2B Q8_0 loses at 1.2, because their reader must round what is spread.
const WORTH_SPREADING: f64 = 1.8e-6;
/// The same where a matrix has fewer groups than there are SMs: beyond this its results leave as floats.
const MOST_IDLE: f64 = 6.4e-6;

/// How whole int8 groups of a result are shared out among blocks.
struct WholeGroups {
    /// Outputs of a block, and the blocks.
    share: u32,
    blocks: u32,
    /// Seconds of the memory's time that the SMs without work leave unused.
    idle: f64,
}

impl WholeGroups {
    /// As many groups to a block as it takes, or as many as every SM can have, and the rest is spread.
    fn of(outputs: u32, bytes: u64, target: &Target) -> WholeGroups {
        let (groups, multiprocessors) = (outputs / 32, target.multiprocessors.max(1));
        let most = groups.div_ceil(multiprocessors).max(1);
        let busy = f64::from(groups) / f64::from(most * multiprocessors);
        let idle = bytes as f64 / target.bandwidth * (1.0 - busy);
        if most > 1 && idle >= WORTH_SPREADING {
            WholeGroups { share: (most - 1) * 32, blocks: multiprocessors, idle: 0.0 }
        } else {
            WholeGroups { share: most * 32, blocks: groups.div_ceil(most), idle }
        }
    }
}

/// Whether the result of a matrix of that many bytes should be left as int8: in whole groups, and not at the price of too many SMs that have none.
pub fn whole_groups_pay(outputs: u32, bytes: u64, target: &Target) -> bool {
    outputs.is_multiple_of(32) && WholeGroups::of(outputs, bytes, target).idle <= MOST_IDLE
}

/// A shape, and what the rule says of it.
#[derive(Clone, Copy, Debug)]
pub struct Ranked {
    pub shape: LaunchShape,
    /// Bytes on their way to an SM at once.
    pub in_flight: u32,
    /// The share of its time that an SM has work.
    pub busy: f32,
    /// It has as many rows a warp, and as many units of them on their way, as its product should have, if that is known: such shapes come before the others, whatever their score.
    pub suits: bool,
}

impl Ranked {
    /// What the rule goes by: the bytes on their way, as far as more of them help, for the share of time that they are.
    pub fn score(&self) -> f32 {
        self.busy.min(FULL) * self.in_flight.min(ENOUGH_BYTES) as f32
    }
}

/// Lanes that share a row: they decide the order of its sums, and so its bits. Nothing of the GPU is in them.
pub fn lanes(product: &Product) -> u32 {
    let units = (product.k / format(product.dtype).unit).max(1);
    match product.is_stretched() {
        // A short row has as many stretches as it fills.
        true => units.next_power_of_two().clamp(8, 32),
        false => [32, 16].into_iter().find(|lanes| units >= *lanes).unwrap_or(8),
    }
}

/// Registers of a lane for units on their way.
fn registers_ahead(warps: u32) -> u32 {
    (REGISTERS.0 / (warps * 32)).saturating_sub(REGISTERS.1)
}

/// The shape in which eight lanes take all stretches of a row, one after the other, so that none is idle: where a quarter of 32 lanes would be, and whole rows are on their way. Gate and up of E2B Q4_0 so, and with four
/// rows of 32 lanes: 1,381 and 1,332 tokens a second (8 and 16 warps: 1,339 and 1,368); q, k, v with one row so, and with two of 32 lanes: 1,346 and 1,332. Heads gain nothing.
fn of_eight_lanes(product: &Product, blocks: Option<(u32, u32)>, target: &Target) -> Option<LaunchShape> {
    let format = format(product.dtype);
    let (units, multiprocessors) = (product.k / format.unit, target.multiprocessors.max(1));
    let is_idle = units * 4 <= units.next_multiple_of(32) * 3 && units > 8 && units.is_multiple_of(8);
    let is_alike = product.is_stretched() && !product.is_joined() && product.prologue.is_normed();
    let rows = if product.geglu { 2 } else { 1 };
    let (warps, depth) = (FEWEST_OF_FEW, units / 8);
    let fits = rows * depth * format.words() <= registers_ahead(warps).min(MOST_OF_WHOLE);
    let tiles = product.outputs.div_ceil(4);
    let is_few = product.geglu || tiles <= warps * multiprocessors;
    let (blocks, share) = blocks.unwrap_or((tiles.div_ceil(warps).min(multiprocessors), 0));
    (is_idle && is_alike && fits && is_few).then_some(LaunchShape { lanes: 8, rows, depth, warps, blocks, share })
}

impl Product {
    /// The shape for a GPU.
    pub fn shape(&self, target: &Target) -> LaunchShape {
        ranked_shapes(self, target)[0].shape
    }
}

/// All shapes that the rule considers, that of the highest score first. There is one at least.
///
/// One block for each SM, as large as it takes: every block reads all activations and computes their norms, so more of
/// them would read more than the weights are. A product that leaves int8 has blocks with whole int8 groups of neighbouring outputs.
pub fn ranked_shapes(product: &Product, target: &Target) -> Vec<Ranked> {
    let (format, multiprocessors) = (format(product.dtype), target.multiprocessors.max(1));
    let (outputs, paired, lanes) = (product.outputs, product.geglu, lanes(product));
    let units = (product.k / format.unit).max(1);
    let steps = units.div_ceil(lanes);
    let bytes = product.dtype.row_bytes(product.k.into()).unwrap_or(0) * product.rows();
    let is_normed = product.prologue.is_normed();
    let (words, registers) = (format.words(), registers_ahead);
    // Bytes that a warp asks for with one load of codes.
    let of_a_load = 32 * 4 * format.code_words();
    // Of a short product two whole rows are on their way to a lane. What takes more instructions a byte than joined lanes do should not have long rows on few SMs.
    let two_at_most = if product.is_joined() { registers(FEWEST_OF_FEW) } else { REGISTERS.2 };
    let is_little = bytes as f64 <= SHORT * target.bandwidth && 2 * steps * words <= two_at_most;
    // A norm keeps the successor waiting anyway, and its blocks should be many.
    let is_short = !is_normed && !paired && is_little;
    let taken_by_short = (multiprocessors * TAKEN_BY_SHORT).div_ceil(10).max(1);
    let fewest_warps = |rows: u32| match is_normed {
        true => (product.k / 128).clamp(FEWEST_OF_FEW, FEWEST_WARPS),
        false if rows <= 2 => FEWEST_OF_FEW,
        false => FEWEST_WARPS,
    };
    // Rows a warp of short products, and of those that norm first and are done with two: more would leave too much to do when the activations are there.
    let of_two_rows = 2 * (32 / lanes) * MANY_WARPS[0] * multiprocessors;
    let two_are_enough = is_short || is_normed && !paired && outputs <= of_two_rows;
    // Of a long product a few whole rows are on their way.
    let is_long = is_normed && !paired && outputs >= of_two_rows * 2 * LONG_ROUNDS;
    let most_units = if product.is_joined() { WHOLE_OF_JOINED } else { WHOLE.0 };
    let fits_whole = |rows: &u32| is_long && rows * steps <= most_units && !(product.is_joined() && *rows == 1);
    let whole_rows = [4, 2, 1].into_iter().find(fits_whole);
    // Where many warps have no room for two rows of a pair as a whole, fewer should have; and where four rows are too much.
    let four_are_too_much =
        !product.is_joined() && 4 * steps > WHOLE_OF_FOUR && 2 * steps * words <= registers(MANY_WARPS[0]);
    let two_should_be_whole =
        is_normed && paired && (2 * steps * words > registers(MANY_WARPS[0]) || four_are_too_much);
    // Joined lanes share two rows, where one round of all SMs has them.
    let warps_of_one_round = outputs.div_ceil(2 * (32 / lanes)).div_ceil(multiprocessors);
    let two_are_one_round = product.is_joined()
        && !(is_normed || paired || is_short)
        && (FEWEST_IN_ROUNDS..=MANY_WARPS[0]).contains(&warps_of_one_round)
        && steps <= LONGEST_OF_ONE_ROUND;
    let groups = product.leaves_int8.then(|| WholeGroups::of(outputs, bytes, target));
    let share = groups.as_ref().map_or(0, |groups| groups.share);
    let shape = |(rows, reach): (u32, u32)| {
        let lane_outputs = if paired { rows / 2 } else { rows };
        // Steps of a whole warp that make all outputs.
        let tiles = outputs.div_ceil(32 / lanes * lane_outputs).max(1);
        // Those that a block's warps share out, or all warps of the grid.
        let shared_out = match &groups {
            None => tiles,
            Some(WholeGroups { share, blocks, .. }) => {
                let most = if share * blocks < outputs { outputs.div_ceil(*blocks) } else { *share };
                most.div_ceil(32 / lanes * lane_outputs)
            }
        };
        let busy = |warps: u32| {
            let all = if share > 0 { warps } else { warps * multiprocessors };
            shared_out as f32 / (shared_out.div_ceil(all) * all) as f32
        };
        let is_full = |warps: &u32| busy(*warps) >= FULL_ROUNDS;
        let fullest = |of: &mut dyn Iterator<Item = u32>| of.max_by(|a, b| busy(*a).total_cmp(&busy(*b)));
        let fullest_of_many = || fullest(&mut MANY_WARPS.into_iter());
        let with_whole_chunks = || {
            let whole = |warps: &u32| is_normed && product.k.is_multiple_of(128 * *warps);
            (FEWEST_IN_ROUNDS..=MANY_WARPS[0]).rev().find(whole).filter(|warps| busy(*warps) >= FULL_OF_CHUNKS)
        };
        // As few warps as have enough whole rows on their way.
        let whole = |enough: u32| {
            let room = |warps: u32| registers(warps).min(MOST_OF_WHOLE);
            let has = |warps: &u32| rows * steps * warps * of_a_load >= enough && rows * steps * words <= room(*warps);
            MANY_WARPS.into_iter().rev().find(has)
        };
        let two_of_whole = whole(ENOUGH_BYTES).or_else(with_whole_chunks);
        let warps = match tiles.div_ceil(multiprocessors) {
            _ if two_should_be_whole && rows == 2 && two_of_whole.is_some() => two_of_whole,
            _ if two_are_one_round && rows == 2 => Some(warps_of_one_round),
            _ if share > 0 => MANY_WARPS.into_iter().find(is_full).or_else(fullest_of_many),
            _ if whole_rows == Some(rows) => whole(WHOLE.1).or(Some(MANY_WARPS[0])),
            few if few > MANY_WARPS[0] => {
                let many = || fullest_of_many().filter(is_full);
                with_whole_chunks().or_else(many).or_else(|| fullest(&mut (FEWEST_IN_ROUNDS..=MANY_WARPS[0])))
            }
            _ if is_short => Some(tiles.div_ceil(taken_by_short).clamp(FEWEST_OF_FEW, MANY_WARPS[0])),
            few => Some(few.max(fewest_warps(rows))),
        };
        let warps = warps.unwrap_or(FEWEST_WARPS);
        let is_to_be_whole = whole_rows == Some(rows) || (two_should_be_whole || two_are_one_round) && rows == 2;
        let (reach, most) = match () {
            _ if is_to_be_whole => (steps, MOST_OF_WHOLE),
            _ if is_short && rows == 2 => (steps, u32::MAX),
            _ => (reach, REGISTERS.2),
        };
        let ahead = registers(warps).min(most);
        // The next row's units are asked for as this one's are used, so a whole row may be on its way. Of depths that
        // waste the fewest loads behind a row's end, the largest.
        let reach = reach.min(steps).min(ahead / words / rows).max(1);
        let loads = |depth: u32| steps.div_ceil(depth) * depth;
        let depth = (reach.div_ceil(2)..=reach).rev().min_by_key(|depth| loads(*depth)).unwrap_or(1);
        let blocks = groups.as_ref().map_or(tiles.div_ceil(warps).min(multiprocessors), |groups| groups.blocks);
        let in_flight = tiles.min(blocks * warps) * rows * depth * of_a_load / multiprocessors;
        // Of one round, SMs without a block cost little: the others' weights are all on their way at once. Of a short product they cost nothing.
        let of_one_round = if is_short && blocks <= taken_by_short { 1.0 } else { 0.9 };
        let is_one_round = tiles <= blocks * warps;
        let one_round = if is_one_round { tiles as f32 / (blocks * warps) as f32 * of_one_round } else { 0.0 };
        let busy = busy(warps).max(one_round);
        let suits = match () {
            _ if two_are_enough || two_are_one_round => rows == 2,
            _ if whole_rows.is_some() => is_to_be_whole && depth == steps,
            _ if two_should_be_whole => rows == 2 && two_of_whole.is_some(),
            _ => !paired && with_whole_chunks() == Some(warps),
        };
        Ranked { shape: LaunchShape { lanes, rows, depth, warps, blocks, share }, in_flight, busy, suits }
    };
    // A pair is two rows, so it cannot be split further. Blocks that norm first should have more than a row a warp. Of equals the one with the most rows.
    let fewest = if (paired || is_normed) && whole_rows != Some(1) { 2 } else { 1 };
    let fits = |(rows, _): &(u32, u32)| (fewest..=lanes).contains(rows);
    let mut ranked: Vec<Ranked> = ROWS_AND_DEPTH.into_iter().filter(fits).map(shape).collect();
    ranked.sort_by(|a, b| b.suits.cmp(&a.suits).then(b.score().total_cmp(&a.score())));
    let of_groups = groups.as_ref().map(|groups| (groups.blocks, groups.share));
    if let Some(shape) = of_eight_lanes(product, of_groups, target) {
        let in_flight = shape.blocks * shape.warps * shape.rows * shape.depth * of_a_load / multiprocessors;
        ranked.insert(0, Ranked { shape, in_flight, busy: 1.0, suits: true });
    }
    if ranked.is_empty() {
        let shape = LaunchShape { lanes, rows: 2, depth: 1, warps: FEWEST_WARPS, blocks: multiprocessors, share };
        ranked.push(Ranked { shape, in_flight: 0, busy: 0.0, suits: false });
    }
    ranked
}
