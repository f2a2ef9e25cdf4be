//! Numbers of a schema: bounds, multiples and single values.

use serde_json::Number as JsonNumber;

use super::refusal::Refusal;

/// Doubles are exact up to here, and so are our bounds. A bound farther out is moved here, which allows less and
/// nothing wrong.
pub const FARTHEST: f64 = 9_007_199_254_740_992.0;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Number {
    pub whole: bool,
    pub least: Option<Bound>,
    pub most: Option<Bound>,
    pub multiple: Option<Decimal>,
    /// This value and no other.
    pub only: Option<JsonNumber>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    pub value: f64,
    pub excluded: bool,
}

/// `digits` divided by ten as often as `places` says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decimal {
    pub digits: u32,
    pub places: u32,
}

/// A number's digits and its power of ten.
fn parts(number: &JsonNumber) -> Option<(i128, i32)> {
    let text = number.to_string().to_lowercase();
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let fraction = fraction.trim_end_matches('0');
    let digits = format!("{whole}{fraction}").parse().ok()?;
    Some((digits, exponent.parse::<i32>().ok()? - fraction.len() as i32))
}

fn power(exponent: u32) -> Option<i128> {
    10i128.checked_pow(exponent)
}

impl Decimal {
    /// What `multipleOf` says; nothing where it has too many digits.
    pub fn read(number: &JsonNumber) -> Option<Decimal> {
        let (mut digits, exponent) = parts(number)?;
        let mut places = 0;
        match exponent {
            0.. => digits = digits.checked_mul(power(exponent as u32)?)?,
            _ => places = exponent.unsigned_abs(),
        }
        while places > 0 && digits % 10 == 0 {
            (digits, places) = (digits / 10, places - 1);
        }
        let decimal = Decimal { digits: u32::try_from(digits).ok().filter(|digits| *digits > 0)?, places };
        // The grammar takes it as a double, which has to give the same digits again.
        let (mut value, mut times) = (decimal.value(), 0);
        while value.fract() != 0.0 && times < 20 {
            (value, times) = (value * 10.0, times + 1);
        }
        (value == f64::from(decimal.digits) && times == decimal.places).then_some(decimal)
    }

    pub fn value(self) -> f64 {
        format!("{}e-{}", self.digits, self.places).parse().unwrap_or(f64::NAN)
    }

    /// The least number that is a multiple of both.
    pub fn join(self, other: Decimal) -> Option<Decimal> {
        let places = self.places.max(other.places);
        let scaled = |one: Decimal| Some(u128::from(one.digits) * power(places - one.places)? as u128);
        let (a, b) = (scaled(self)?, scaled(other)?);
        let (mut x, mut y) = (a, b);
        while y != 0 {
            (x, y) = (y, x % y);
        }
        let joined = format!("{}e-{places}", a / x * b).parse::<JsonNumber>().ok()?;
        Decimal::read(&joined)
    }

    fn divides(self, number: &JsonNumber) -> bool {
        let Some((digits, exponent)) = parts(number) else { return false };
        let shift = exponent + self.places as i32;
        let scaled = match shift {
            0.. => power(shift as u32).and_then(|power| digits.checked_mul(power)),
            _ => power(shift.unsigned_abs()).filter(|power| digits % power == 0).map(|power| digits / power),
        };
        scaled.is_some_and(|scaled| scaled % i128::from(self.digits) == 0)
    }
}

impl Number {
    /// One value. A whole one is written without a fraction.
    pub fn only(number: &JsonNumber) -> Result<Number, Refusal> {
        let inexact = || Refusal::new("const", format!("has a number that a double cannot hold: {number}"));
        let value = number.as_f64().filter(|value| value.is_finite()).ok_or_else(inexact)?;
        let is_exact = match number.as_i128() {
            Some(whole) => whole == value as i128,
            None => true,
        };
        if !is_exact {
            return Err(inexact());
        }
        let whole = value.fract() == 0.0;
        let number = match whole && value.abs() <= FARTHEST {
            true => JsonNumber::from(value as i64),
            false => number.clone(),
        };
        Ok(Number { whole, only: Some(number), ..Number::default() })
    }

    pub fn allows(&self, value: &JsonNumber) -> bool {
        let number = value.as_f64().unwrap_or(f64::NAN);
        let is_above = self.least.is_none_or(|least| number > least.value || number == least.value && !least.excluded);
        let is_below = self.most.is_none_or(|most| number < most.value || number == most.value && !most.excluded);
        let divides = self.multiple.is_none_or(|multiple| multiple.divides(value));
        let equals = self.only.as_ref().is_none_or(|only| only.as_f64() == Some(number));
        is_above && is_below && divides && equals && (!self.whole || number.fract() == 0.0)
    }
}
