//! The size that a picture is brought to: as large as a budget of soft tokens allows, up or down, its proportions kept.

use super::decode::PictureError;
use super::picture::Pixels;

/// Soft tokens of a picture, at most: the values that the model was trained with.
pub const BUDGETS: [u32; 5] = [70, 140, 280, 560, 1120];
/// Where nobody says.
pub const USUAL_BUDGET: u32 = 280;

/// How a tower wants its pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Pixels along a patch.
    pub patch: u32,
    /// Patches along the square of a soft token.
    pub pool: u32,
    /// Soft tokens of a picture, at most.
    pub budget: u32,
}

/// The largest size with the picture's proportions whose sides are whole squares of soft tokens, no more of them than
/// the budget.
pub fn target_size(from: Pixels, cut: Cut) -> Result<Pixels, PictureError> {
    let unit = cut.patch * cut.pool;
    let (width, height) = (f64::from(from.width), f64::from(from.height));
    let target = f64::from(cut.budget) * f64::from(unit) * f64::from(unit);
    let factor = (target / (width * height)).sqrt();
    let squares = |side: f64| (factor * side / f64::from(unit)).floor() as u32;
    // A picture so long that it is thinner than a square is one square thick, and as long as its proportions say.
    let long = |long: u32, short: u32| (long / short).min(cut.budget);
    let (columns, rows) = match (squares(width), squares(height)) {
        (0, 0) => return Err(PictureError::Budget { budget: cut.budget }),
        (columns, 0) => (if columns > 0 { long(from.width, from.height) } else { 0 }, 1),
        (0, _) => (1, long(from.height, from.width)),
        both => both,
    };
    Ok(Pixels { width: columns * unit, height: rows * unit })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(width: u32, height: u32, budget: u32) -> (u32, u32) {
        let cut = Cut { patch: 16, pool: 3, budget };
        let size = target_size(Pixels { width, height }, cut).unwrap();
        (size.width, size.height)
    }

    #[test]
    fn sizes_of_the_reference() {
        assert_eq!(size(150, 101, 70), (480, 288));
        assert_eq!(size(64, 200, 70), (192, 672));
        assert_eq!(size(500, 300, 70), (480, 288));
        assert_eq!(size(900, 40, 70), (1872, 48));
        assert_eq!(size(333, 250, 70), (432, 336));
    }

    #[test]
    fn thin_pictures_are_a_square_thick_and_within_the_budget() {
        assert_eq!(size(10_000, 10, 70), (70 * 48, 48));
        assert_eq!(size(1, 30_000, 1120), (48, 1120 * 48));
        assert_eq!(size(1, 1, 70), (8 * 48, 8 * 48));
        for budget in BUDGETS {
            for (width, height) in [(1, 1), (3, 1000), (4000, 3000), (16_384, 1), (127, 129)] {
                let (width, height) = size(width, height, budget);
                assert!(width > 0 && height > 0 && (width / 48) * (height / 48) <= budget);
            }
        }
    }
}
