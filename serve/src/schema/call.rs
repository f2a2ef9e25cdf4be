//! The grammar of a call, in Gemma's notation (`language/call.rs` reads it), from the forms of the tools' arguments.
//!
//! Keys are bare and sorted as the chat template sorts them; strings stand between quote tokens and have no escapes;
//! nothing is white space. Names that the schema neither lists nor speaks of do not come: a tool gets the arguments
//! that it knows.

use std::collections::BTreeMap;
use std::fmt::Write;

use llguidance::regex_to_lark;
use serde_json::{Value, json};

use super::form::{Form, List, Object, Schema};
use super::json;
use super::number::Number;
use super::refusal::Refusal;
use super::text::{Pattern, Text, lengths, may_match};
use crate::error::ApiError;
use crate::tools::Declared;

const MOST_RULES: usize = 4000;
/// Names that need no quotes.
const BARE: &str = r"[A-Za-z_$][A-Za-z0-9_.$\-]{0,63}";

/// Rules that every grammar has. Numbers have as many digits as a double takes without overflow.
const COMMON: &str = r#"
TEXT: /(?s:.+)/
INTEGER: /-?(0|[1-9][0-9]{0,17})/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/
boolean: "true" | "false"
any: string | NUMBER | boolean | "null" | any_object | any_list
any_object: "{" (any_pair ("," any_pair)*)? "}"
any_pair: KEY ":" any
any_list: "[" (any ("," any)*)? "]"
"#;

/// Builds a grammar rule by rule.
struct Rules<'a> {
    text: String,
    count: usize,
    quote: u32,
    schema: &'a Schema,
    /// The rules of the current tool's definitions.
    defined: BTreeMap<usize, String>,
}

/// The grammar of what follows the marker of a call, up to and with its end.
pub fn lark(tools: &[(&Declared, Schema)], quote: u32, close: u32) -> Result<String, ApiError> {
    let mut text = format!("{COMMON}KEY: /{BARE}/\nstring: <[{quote}]> TEXT? <[{quote}]>\n");
    let (mut starts, mut count) = (Vec::new(), 0);
    for (tool, schema) in tools {
        let mut rules = Rules { text, count, quote, schema, defined: BTreeMap::new() };
        let arguments = rules.arguments().map_err(|refusal| refusal.error(&tool.param))?;
        starts.push(format!("{} {arguments} <[{close}]>", literal(&format!("call:{}", tool.tool.name))));
        (text, count) = (rules.text, rules.count);
    }
    _ = writeln!(text, "start: {}", starts.join(" | "));
    Ok(text)
}

/// A text that must come as it stands.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

fn is_bare(name: &str) -> bool {
    Pattern(BARE.into()).matches(name)
}

impl Rules<'_> {
    fn rule(&mut self, prefix: &str, body: &str) -> Result<String, Refusal> {
        self.count += 1;
        if self.count > MOST_RULES {
            return Err(Refusal::new("schema", "is too large, with its alternatives"));
        }
        let name = format!("{prefix}{}", self.count);
        _ = writeln!(self.text, "{name}: {body}");
        Ok(name)
    }

    /// Arguments are an object, whatever else the schema lets a value be.
    fn arguments(&mut self) -> Result<String, Refusal> {
        let mut forms = Vec::new();
        self.schema.plain(&self.schema.form, &mut forms);
        let mut ways = Vec::new();
        for form in forms {
            match form {
                Form::Object(object) => ways.push(self.object(object, true)?),
                Form::Any => ways.push(self.object(&Object::default(), true)?),
                _ => {}
            }
        }
        match ways.is_empty() {
            true => Err(Refusal::new("type", "must let the arguments of a function be an object")),
            false => self.rule("r", &ways.join(" | ")),
        }
    }

    fn value(&mut self, form: &Form) -> Result<String, Refusal> {
        Ok(match form {
            Form::Any => "any".into(),
            // What refers to this is left out before; a terminal that matches nothing is refused by the compiler.
            Form::Nothing(keyword) => {
                return Err(Refusal::new(keyword, "leaves no value that could follow the schema"));
            }
            Form::Null => "\"null\"".into(),
            Form::Boolean(None) => "boolean".into(),
            Form::Boolean(Some(only)) => literal(&only.to_string()),
            Form::Number(number) => return self.number(number),
            Form::Text(text) => return self.string(text),
            Form::List(list) => return self.list(list),
            Form::Object(object) => return self.object(object, false),
            Form::Either(forms) => {
                let ways: Vec<String> = forms.iter().map(|form| self.value(form)).collect::<Result<_, _>>()?;
                return self.rule("r", &ways.join(" | "));
            }
            Form::Refer(index) => return self.definition(*index),
        })
    }

    fn definition(&mut self, index: usize) -> Result<String, Refusal> {
        if let Some(name) = self.defined.get(&index) {
            return Ok(name.clone());
        }
        self.count += 1;
        let name = format!("d{}", self.count);
        self.defined.insert(index, name.clone());
        let schema = self.schema;
        let body = self.value(&schema.defined[index])?;
        _ = writeln!(self.text, "{name}: {body}");
        Ok(name)
    }

    /// Numbers are JSON's, so its compiler makes what has bounds.
    fn number(&mut self, number: &Number) -> Result<String, Refusal> {
        if let Some(only) = &number.only {
            return Ok(literal(&only.to_string()));
        }
        if *number == (Number { whole: number.whole, ..Number::default() }) {
            return Ok(if number.whole { "INTEGER" } else { "NUMBER" }.into());
        }
        let mut schema = json::number(number);
        schema["x-guidance"] = json!({ "whitespace_flexible": false });
        self.rule("n", &format!("%json {schema}"))
    }

    fn string(&mut self, text: &Text) -> Result<String, Refusal> {
        let quote = self.quote;
        match &text.only {
            Some(only) if only.is_empty() => return Ok(format!("(<[{quote}]> <[{quote}]>)")),
            Some(only) => return Ok(format!("(<[{quote}]> {} <[{quote}]>)", literal(only))),
            None if *text == Text::default() => return Ok("string".into()),
            None => {}
        }
        let may_be_empty = text.allows("");
        let mut parts: Vec<String> = text.patterns.iter().map(regex).collect();
        // A terminal is not empty: where a string may be, it is left out.
        let most = text.most.filter(|most| *most > 0);
        if text.most != Some(0) {
            parts.extend(lengths(text.least.max(1), most).map(|lengths| format!("/{lengths}/")));
        }
        let has_more = text.most != Some(0) && may_match(&text.patterns, text.least.max(1), most);
        if !has_more {
            return Ok(format!("(<[{quote}]> <[{quote}]>)"));
        }
        let terminal = self.rule("T", &parts.join(" & "))?;
        let mark = if may_be_empty { "?" } else { "" };
        self.rule("r", &format!("<[{quote}]> {terminal}{mark} <[{quote}]>"))
    }

    fn list(&mut self, list: &List) -> Result<String, Refusal> {
        let (first, least) = (list.first.len() as u64, list.least);
        let rest = match list.most.is_some_and(|most| most <= first) || list.rest.is_nothing() {
            true => None,
            false => Some(self.value(&list.rest)?),
        };
        // From the last to the first: what follows an item, with its comma.
        let mut after = String::new();
        if let Some(item) = &rest {
            after = match first {
                0 => String::new(),
                _ => {
                    let more = repeated(item, least.saturating_sub(first), list.most.map(|most| most - first));
                    self.rule("r", &more)?
                }
            };
        }
        for (at, form) in list.first.iter().enumerate().rev() {
            let item = self.value(form)?;
            let comma = if at == 0 { "" } else { "\",\" " };
            let body = match (at as u64) < least {
                true => format!("{comma}{item} {after}"),
                false => format!("({comma}{item} {after})?"),
            };
            after = self.rule("r", &body)?;
        }
        if let (0, Some(item)) = (first, &rest) {
            let more = repeated(item, least.saturating_sub(1), list.most.map(|most| most - 1));
            after = if least == 0 { format!("({item} {more})?") } else { format!("{item} {more}") };
        }
        self.rule("r", &format!("\"[\" {after} \"]\""))
    }

    /// A listed name with its colon.
    fn key(&self, name: &str) -> String {
        let quote = self.quote;
        match name {
            name if is_bare(name) => literal(&format!("{name}:")),
            "" => format!("<[{quote}]> <[{quote}]> \":\""),
            name => format!("<[{quote}]> {} <[{quote}]> \":\"", literal(name)),
        }
    }

    /// Names that are not listed, with their values.
    fn others(&mut self, object: &Object) -> Result<Option<String>, Refusal> {
        let listed: Vec<String> = object.properties.iter().map(|(name, _)| literal(name)).collect();
        let not_listed = if listed.is_empty() { String::new() } else { format!(" & ~({})", listed.join(" | ")) };
        let mut ways = Vec::new();
        for (pattern, form) in object.patterns.iter().filter(|(_, form)| !form.is_nothing()) {
            let value = self.value(form)?;
            let quote = self.quote;
            let bare = Pattern(BARE.into());
            ways.push(match may_match(&[pattern.clone(), bare], 0, None) {
                true => {
                    let name = self.rule("T", &format!("{} & /{BARE}/{not_listed}", regex(pattern)))?;
                    format!("{name} \":\" {value}")
                }
                false => {
                    let name = self.rule("T", &format!("{} & /(?s:.+)/{not_listed}", regex(pattern)))?;
                    format!("<[{quote}]> {name} <[{quote}]> \":\" {value}")
                }
            });
        }
        if !object.others.is_nothing() {
            let patterns: String =
                object.patterns.iter().map(|(pattern, _)| format!(" & ~{}", regex(pattern))).collect();
            let value = self.value(&object.others)?;
            let name = match format!("{not_listed}{patterns}") {
                nothing if nothing.is_empty() => "KEY".into(),
                excluded => self.rule("T", &format!("/{BARE}/{excluded}"))?,
            };
            ways.push(format!("{name} \":\" {value}"));
        }
        match ways.is_empty() {
            true => Ok(None),
            false => self.rule("r", &ways.join(" | ")).map(Some),
        }
    }

    fn object(&mut self, object: &Object, is_top: bool) -> Result<String, Refusal> {
        let is_listed = is_top || !object.properties.is_empty();
        let takes_others = object.speaks_of_others || object.least > 0 || !is_listed;
        if *object == Object::default() && !is_top {
            return Ok("any_object".into());
        }
        let others = if takes_others { self.others(object)? } else { None };
        // From the last to the first: what follows when something came before, and when nothing did.
        let required = object.required.len() as u64;
        let (least, most) = (object.least.saturating_sub(required), object.most.map(|most| most - required.min(most)));
        let (mut after_some, mut after_none) = match others.filter(|_| most != Some(0)) {
            None => (String::new(), String::new()),
            Some(pair) => {
                let some = repeated(&pair, least, most);
                let more = repeated(&pair, least.saturating_sub(1), most.map(|most| most - 1));
                let none = format!("{pair} {more}");
                let none = if least == 0 { format!("({none})?") } else { none };
                (self.rule("r", &some)?, self.rule("r", &none)?)
            }
        };
        let mut sorted: Vec<&(String, Form)> =
            object.properties.iter().filter(|(_, form)| !form.is_nothing()).collect();
        sorted.sort_by_key(|(key, _)| key.to_lowercase());
        for (key, form) in sorted.into_iter().rev() {
            let (value, name) = (self.value(form)?, self.key(key));
            let pair = self.rule("r", &format!("{name} {value}"))?;
            let first = format!("{pair} {after_some}");
            let is_required = object.required.contains(key);
            after_none = match is_required {
                true => self.rule("r", &first)?,
                false if after_none.is_empty() => self.rule("r", &format!("({first})?"))?,
                false => self.rule("r", &format!("{first} | {after_none}"))?,
            };
            let more = match is_required {
                true => format!("\",\" {pair} {after_some}"),
                false => format!("(\",\" {pair})? {after_some}"),
            };
            after_some = self.rule("r", &more)?;
        }
        self.rule("r", &format!("\"{{\" {after_none} \"}}\""))
    }
}

/// So many of them, each after a comma.
fn repeated(item: &str, least: u64, most: Option<u64>) -> String {
    match most {
        Some(0) => String::new(),
        Some(most) => format!("(\",\" {item}){{{least},{most}}}"),
        None => format!("(\",\" {item}){{{least},}}"),
    }
}

/// A regular expression of a whole string, as a terminal has it.
fn regex(pattern: &Pattern) -> String {
    format!("/{}/", regex_to_lark(&pattern.0, ""))
}
