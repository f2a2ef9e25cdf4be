//! Settings of single modules in `adapter_config.json`: a number for every module whose name ends so.
//!
//! PEFT takes the keys as regular expressions that match a whole name, or what follows a dot in it. Those that people
//! write are names or their ends; any other is refused, because a number that is not found would change nothing, in
//! silence.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

use super::error::Fault;
use crate::checkpoint::shown;

/// Keys of one pattern: more than a model has modules.
const MOST_KEYS: usize = 1 << 16;

/// Keys and their numbers, in the order of the file: the first that matches counts.
#[derive(Debug, Default)]
pub struct Pattern(Vec<(String, f64)>);

impl Pattern {
    /// Refuses keys that are not read, under the name of the setting.
    pub fn check(&self, setting: &str) -> Result<(), Fault> {
        for (key, number) in &self.0 {
            let name = || format!("{setting} of `{}`", shown(key));
            if literal(key).is_none() {
                return Err(Fault::setting(&name(), "is for a regular expression: only names of modules are read"));
            }
            if !number.is_finite() {
                return Err(Fault::setting(&name(), format!("is {number}")));
            }
        }
        Ok(())
    }

    /// The number of a module.
    pub fn of(&self, module: &str) -> Option<f64> {
        let matches = |(key, _): &&(String, f64)| literal(key).is_some_and(|key| key.matches(module));
        self.0.iter().find(matches).map(|(_, number)| *number)
    }
}

/// A key that stands for itself.
struct Literal {
    text: String,
    /// It is the whole name and not its end.
    is_whole: bool,
}

impl Literal {
    fn matches(&self, module: &str) -> bool {
        let Some(before) = module.strip_suffix(&self.text) else { return false };
        before.is_empty() || !self.is_whole && before.ends_with('.')
    }
}

/// A key without what says that it is the start or the end, and without escapes of dots.
fn literal(key: &str) -> Option<Literal> {
    let (is_whole, rest) = key.strip_prefix('^').map_or((false, key), |rest| (true, rest));
    let rest = rest.strip_suffix('$').unwrap_or(rest);
    let text = rest.replace("\\.", ".");
    let is_plain = text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'));
    (is_plain && !text.is_empty()).then_some(Literal { text, is_whole })
}

impl<'de> Deserialize<'de> for Pattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Pattern, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = Pattern;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of modules and numbers")
            }

            fn visit_unit<E: Error>(self) -> Result<Pattern, E> {
                Ok(Pattern::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pattern, A::Error> {
                let mut keys = Vec::new();
                while let Some(entry) = map.next_entry::<String, f64>()? {
                    if keys.len() == MOST_KEYS {
                        return Err(A::Error::custom(format!("more than {MOST_KEYS} modules")));
                    }
                    keys.push(entry);
                }
                Ok(Pattern(keys))
            }
        }
        deserializer.deserialize_any(Keys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_a_name_or_its_end_behind_a_dot() {
        let json =
            r#"{"layers.1.self_attn.k_proj": 2, "proj": 9, "^model\\.layers\\.0\\.mlp\\.up_proj$": 5, "up_proj": 8}"#;
        let pattern: Pattern = serde_json::from_str(json).expect("an object");
        pattern.check("rank_pattern").expect("plain keys");
        assert_eq!(pattern.of("model.layers.1.self_attn.k_proj"), Some(2.0));
        assert_eq!(pattern.of("model.layers.11.self_attn.k_proj"), None);
        assert_eq!(pattern.of("model.layers.0.mlp.up_proj"), Some(5.0));
        assert_eq!(pattern.of("a.model.layers.0.mlp.up_proj"), Some(8.0));
        assert_eq!(pattern.of("up_proj"), Some(8.0));
        assert_eq!(pattern.of("gate_proj"), None);
    }

    #[test]
    fn other_keys_are_refused_by_name() {
        for key in ["layers.(1|4).*", ".*q_proj", "q_proj|v_proj", ""] {
            let pattern: Pattern = serde_json::from_value(serde_json::json!({ key: 2 })).expect("an object");
            let refused = pattern.check("alpha_pattern").expect_err(key).to_string();
            assert!(refused.contains("alpha_pattern") && refused.contains(key), "{refused}");
        }
    }
}
