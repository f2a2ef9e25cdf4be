//! Numbers and strings that must be several things at once: what is left of them, as a form.

use super::form::Form;
use super::number::{Bound, Decimal, FARTHEST, Number};
use super::refusal::Refusal;
use super::text::{LONGEST, Text, may_match};

impl Number {
    pub fn meet(self, other: Number) -> Result<Form, Refusal> {
        let only = match (self.only.clone(), other.only.clone()) {
            (Some(only), _) | (None, Some(only)) => Some(only),
            (None, None) => None,
        };
        if let Some(only) = only {
            return Ok(match self.allows(&only) && other.allows(&only) {
                true => {
                    Form::Number(Number { whole: self.whole || other.whole, only: Some(only), ..Number::default() })
                }
                false => Form::Nothing("const".into()),
            });
        }
        let multiple = match (self.multiple, other.multiple) {
            (Some(one), Some(other)) => {
                Some(one.join(other).ok_or_else(|| Refusal::new("multipleOf", "has too many digits"))?)
            }
            (one, other) => one.or(other),
        };
        let farther = |one: Option<Bound>, other: Option<Bound>, sign: f64| match (one, other) {
            (Some(a), Some(b)) => {
                let (x, y) = (a.value * sign, b.value * sign);
                Some(if x > y || x == y && a.excluded { a } else { b })
            }
            (a, b) => a.or(b),
        };
        let least = farther(self.least, other.least, 1.0);
        let most = farther(self.most, other.most, -1.0);
        Number { whole: self.whole || other.whole, least, most, multiple, only: None }.settle()
    }

    /// With bounds that the grammar can take; nothing where no number lies between them.
    pub fn settle(mut self) -> Result<Form, Refusal> {
        if self.whole {
            let inner = |bound: Bound, rounded: f64, step: f64| {
                let value = if bound.excluded && rounded == bound.value { rounded + step } else { rounded };
                Bound { value, excluded: false }
            };
            self.least = self.least.map(|least| inner(least, least.value.ceil(), 1.0));
            self.most = self.most.map(|most| inner(most, most.value.floor(), -1.0));
        }
        let too_far = |keyword: &str| Err(Refusal::new(keyword, format!("must lie within {FARTHEST:e} of 0")));
        match (self.least, self.most) {
            (Some(least), _) if least.value >= FARTHEST => return too_far("minimum"),
            (_, Some(most)) if most.value <= -FARTHEST => return too_far("maximum"),
            _ => {}
        }
        let nearest = Bound { value: -FARTHEST, excluded: false };
        self.least = self.least.map(|least| if least.value < -FARTHEST { nearest } else { least });
        let nearest = Bound { value: FARTHEST, excluded: false };
        self.most = self.most.map(|most| if most.value > FARTHEST { nearest } else { most });
        if let (Some(least), Some(most)) = (self.least, self.most) {
            if least.value > most.value || least.value == most.value && (least.excluded || most.excluded) {
                return Ok(Form::Nothing("minimum".into()));
            }
            let step = self.multiple.map(Decimal::value);
            if step.is_some_and(|step| (most.value / step).floor() < (least.value / step).ceil()) {
                return Ok(Form::Nothing("multipleOf".into()));
            }
        }
        Ok(Form::Number(self))
    }
}

impl Text {
    pub fn meet(mut self, other: Text) -> Form {
        if let Some(only) = self.only.as_ref().or(other.only.as_ref()) {
            return match self.allows(only) && other.allows(only) {
                true => Form::Text(Text::only(only)),
                false => Form::Nothing("const".into()),
            };
        }
        for pattern in other.patterns {
            if !self.patterns.contains(&pattern) {
                self.patterns.push(pattern);
            }
        }
        self.least = self.least.max(other.least);
        self.most = [self.most, other.most].into_iter().flatten().min();
        self.settle()
    }

    pub fn settle(mut self) -> Form {
        self.most = self.most.filter(|most| *most <= LONGEST);
        if self.least > self.most.unwrap_or(LONGEST) {
            return Form::Nothing("minLength".into());
        }
        match self.patterns.is_empty() || may_match(&self.patterns, self.least, self.most) {
            true => Form::Text(self),
            false => Form::Nothing("pattern".into()),
        }
    }
}
