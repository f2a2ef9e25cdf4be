//! One call of a tool, from Gemma's notation to JSON as it comes.
//!
//! ```text
//! call:NAME{KEY:value,…}      value = <|"|> any text <|"|> | number | true | false | null | {KEY:value,…} | [value,…]
//! ```
//!
//! The name is given out when it is complete, strings as they come, bare values when their end is seen. It is as
//! lenient as models are sloppy: other quotes, a missing first quote, and types that the tool's schema corrects. What
//! it cannot read ends the call, closed as valid JSON, and is handed back.

use std::sync::Arc;

use serde_json::Value;

use super::pieces::{Delta, Mark, Tool};

/// A name that is longer is none.
const LONGEST_HEAD: usize = 256;
const DEEPEST: usize = 64;

/// How a string is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Quote {
    Mark,
    Character(char),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Head,
    Key,
    QuotedKey(Quote),
    /// A quoted key is complete, its colon is missing.
    AfterKey,
    Value,
    /// Text that is given out as it comes, or held back because the schema wants something else.
    Text {
        quote: Quote,
        held: bool,
    },
    Escape {
        quote: Quote,
        held: bool,
    },
    Bare,
    After,
    Done,
}

/// An object or a list that is open.
#[derive(Debug)]
struct Level {
    is_object: bool,
    is_empty: bool,
    items: usize,
    schema: Value,
}

/// Whether more is expected.
#[derive(Debug, PartialEq)]
pub(super) enum Flow {
    On,
    /// This cannot be read: the call has ended before it.
    Failed(String),
}

#[derive(Debug)]
pub(super) struct Call {
    index: usize,
    tools: Arc<[Tool]>,
    /// Whether its marker was there, and belongs to what is handed back.
    has_mark: bool,
    is_named: bool,
    stage: Stage,
    levels: Vec<Level>,
    /// What is not given out yet.
    buffer: String,
    /// Schema of the value that comes next.
    schema: Value,
    json: String,
}

impl Call {
    pub fn new(index: usize, tools: Arc<[Tool]>, has_mark: bool) -> Call {
        Call {
            index,
            tools,
            has_mark,
            is_named: false,
            stage: Stage::Head,
            levels: Vec::new(),
            buffer: String::new(),
            schema: Value::Null,
            json: String::new(),
        }
    }

    pub fn is_named(&self) -> bool {
        self.is_named
    }

    pub fn text(&mut self, text: &str, out: &mut Vec<Delta>) -> Flow {
        for (at, character) in text.char_indices() {
            if !self.character(character, out) {
                let mut rest = self.close(out);
                rest.push_str(&text[at..]);
                return Flow::Failed(rest);
            }
        }
        self.give_out(out);
        Flow::On
    }

    /// Whether the mark belongs to the call and it goes on.
    pub fn mark(&mut self, mark: Mark, out: &mut Vec<Delta>) -> bool {
        let goes_on = match (mark, self.stage) {
            (Mark::Quote, Stage::Key) if self.buffer.is_empty() => {
                self.stage = Stage::QuotedKey(Quote::Mark);
                true
            }
            (Mark::Quote, Stage::QuotedKey(_)) => {
                self.stage = Stage::AfterKey;
                true
            }
            (Mark::Quote, Stage::Value) => {
                self.begin_text(Quote::Mark);
                true
            }
            (Mark::Quote, Stage::Text { .. } | Stage::Escape { .. }) => {
                self.end_text();
                true
            }
            // The first quote was forgotten.
            (Mark::Quote, Stage::Bare) => {
                let text = std::mem::take(&mut self.buffer);
                self.json.push_str(&Value::String(text).to_string());
                self.stage = Stage::After;
                true
            }
            (Mark::Quote, Stage::After | Stage::Done) => true,
            (Mark::CallClose | Mark::CallOpen | Mark::ResponseOpen, _) => false,
            // A string has everything up to its quote.
            (mark, Stage::Text { .. }) => {
                mark.spelling().chars().for_each(|character| self.push_text(character));
                true
            }
            (Mark::Hidden, _) => true,
            _ => false,
        };
        self.give_out(out);
        goes_on
    }

    /// Makes valid JSON of what there is, and returns what could not be read.
    pub fn close(&mut self, out: &mut Vec<Delta>) -> String {
        let mut rest = String::new();
        match self.stage {
            Stage::Head => {
                let mark = if self.has_mark { Mark::CallOpen.spelling() } else { "" };
                return format!("{mark}{}", std::mem::take(&mut self.buffer));
            }
            Stage::Key | Stage::QuotedKey(_) | Stage::AfterKey => rest = std::mem::take(&mut self.buffer),
            Stage::Value if self.levels.last().is_some_and(|level| level.is_object) => self.json.push_str("null"),
            Stage::Text { .. } | Stage::Escape { .. } => self.end_text(),
            Stage::Bare => self.end_bare(),
            _ => {}
        }
        while self.pop() {}
        self.give_out(out);
        rest
    }

    /// Gives out what was held back when a limit has cut the call: JSON as far as it came.
    pub fn cut(&mut self, out: &mut Vec<Delta>) {
        let buffer = std::mem::take(&mut self.buffer);
        let opened = Value::String(buffer.clone()).to_string();
        let opened = &opened[..opened.len() - 1];
        match self.stage {
            Stage::Bare => self.json.push_str(&buffer),
            _ if buffer.is_empty() => {}
            Stage::Key | Stage::QuotedKey(_) | Stage::AfterKey => {
                let is_first = self.levels.last().is_none_or(|level| level.is_empty);
                self.json.push_str(if is_first { "" } else { "," });
                self.json.push_str(opened);
            }
            _ => self.json.push_str(opened),
        }
        self.give_out(out);
    }

    fn give_out(&mut self, out: &mut Vec<Delta>) {
        if !self.json.is_empty() {
            out.push(Delta::Arguments { index: self.index, text: std::mem::take(&mut self.json) });
        }
    }

    /// `false` for a character that has no place here.
    fn character(&mut self, character: char, out: &mut Vec<Delta>) -> bool {
        let is_space = character.is_whitespace();
        match self.stage {
            Stage::Head => return self.head(character, out),
            Stage::Key => match character {
                '}' if self.buffer.is_empty() => _ = self.pop(),
                ',' if self.buffer.is_empty() => {}
                '"' | '\'' | '`' if self.buffer.is_empty() => {
                    self.stage = Stage::QuotedKey(Quote::Character(character));
                }
                ':' => return self.end_key(),
                ',' | '{' | '}' | '[' | ']' => return false,
                _ if is_space && self.buffer.is_empty() => {}
                _ => self.buffer.push(character),
            },
            Stage::QuotedKey(quote) if quote == Quote::Character(character) => self.stage = Stage::AfterKey,
            Stage::QuotedKey(_) => self.buffer.push(character),
            Stage::AfterKey if character == ':' => return self.end_key(),
            Stage::AfterKey => return is_space,
            Stage::Value => return self.begin_value(character),
            Stage::Text { quote, .. } if quote == Quote::Character(character) => self.end_text(),
            Stage::Text { quote: quote @ Quote::Character(_), held } if character == '\\' => {
                self.stage = Stage::Escape { quote, held };
            }
            Stage::Text { .. } => self.push_text(character),
            Stage::Escape { quote, held } => {
                self.stage = Stage::Text { quote, held };
                match character {
                    'n' => self.push_text('\n'),
                    't' => self.push_text('\t'),
                    'r' => self.push_text('\r'),
                    '"' | '\'' | '`' | '\\' | '/' => self.push_text(character),
                    other => ['\\', other].into_iter().for_each(|character| self.push_text(character)),
                }
            }
            Stage::Bare => match character {
                ',' | '}' | ']' => {
                    self.end_bare();
                    return self.character(character, out);
                }
                _ => self.buffer.push(character),
            },
            Stage::After => {
                let is_object = self.levels.last().is_some_and(|level| level.is_object);
                match character {
                    ',' if is_object => self.stage = Stage::Key,
                    ',' => self.begin_item(),
                    '}' if is_object => _ = self.pop(),
                    ']' if !is_object => _ = self.pop(),
                    _ => return is_space,
                }
            }
            Stage::Done => return is_space,
        }
        true
    }

    fn head(&mut self, character: char, out: &mut Vec<Delta>) -> bool {
        if character != '{' {
            self.buffer.push(character);
            // The character is in the buffer, which `close` hands back: it must not come twice.
            if self.buffer.len() > LONGEST_HEAD {
                self.buffer.pop();
                return false;
            }
            return true;
        }
        let head = self.buffer.trim();
        let name = head.strip_prefix("call:").or_else(|| head.strip_prefix(':')).unwrap_or(head).trim();
        let tool = self.tools.iter().find(|tool| tool.name == name);
        let was_announced = head.starts_with("call:");
        if name.is_empty() || name.contains(char::is_whitespace) || (tool.is_none() && !was_announced) {
            return false;
        }
        self.schema = tool.map(|tool| tool.parameters.clone()).unwrap_or_default();
        out.push(Delta::Call { index: self.index, name: name.to_owned() });
        self.is_named = true;
        self.buffer.clear();
        self.push_level(true)
    }

    fn push_level(&mut self, is_object: bool) -> bool {
        if self.levels.len() >= DEEPEST {
            return false;
        }
        self.json.push(if is_object { '{' } else { '[' });
        let schema = std::mem::take(&mut self.schema);
        self.levels.push(Level { is_object, is_empty: true, items: 0, schema });
        if is_object {
            self.stage = Stage::Key;
        } else {
            self.begin_item();
        }
        true
    }

    /// Closes the innermost level; `false` where there is none.
    fn pop(&mut self) -> bool {
        let Some(level) = self.levels.pop() else { return false };
        self.json.push(if level.is_object { '}' } else { ']' });
        self.stage = if self.levels.is_empty() { Stage::Done } else { Stage::After };
        true
    }

    fn begin_item(&mut self) {
        self.stage = Stage::Value;
        self.schema = Value::Null;
        if let Some(level) = self.levels.last_mut() {
            let first = level.schema.get("prefixItems").and_then(|first| first.get(level.items));
            self.schema = first.or(level.schema.get("items")).cloned().unwrap_or_default();
            level.items += 1;
        }
    }

    fn end_key(&mut self) -> bool {
        let (is_quoted, key) = (self.stage == Stage::AfterKey, std::mem::take(&mut self.buffer));
        let key = if is_quoted { key } else { key.trim().to_owned() };
        let Some(level) = self.levels.last_mut().filter(|_| is_quoted || !key.is_empty()) else { return false };
        self.schema = level.schema.get("properties").and_then(|all| all.get(&key)).cloned().unwrap_or_default();
        if !std::mem::replace(&mut level.is_empty, false) {
            self.json.push(',');
        }
        self.json.push_str(&Value::String(key).to_string());
        self.json.push(':');
        self.stage = Stage::Value;
        true
    }

    /// A list has its comma before the value that follows it.
    fn separate(&mut self) {
        if let Some(level) = self.levels.last_mut().filter(|level| !level.is_object)
            && !std::mem::replace(&mut level.is_empty, false)
        {
            self.json.push(',');
        }
    }

    fn begin_value(&mut self, character: char) -> bool {
        let in_list = self.levels.last().is_some_and(|level| !level.is_object);
        match character {
            _ if character.is_whitespace() => {}
            ']' if in_list => _ = self.pop(),
            ',' if in_list => {}
            ']' => return false,
            '"' | '\'' | '`' => self.begin_text(Quote::Character(character)),
            '{' | '[' => {
                self.separate();
                return self.push_level(character == '{');
            }
            // An object's value that is not there.
            ',' | '}' if !in_list => {
                self.json.push_str("null");
                self.stage = Stage::After;
                return self.character(character, &mut Vec::new());
            }
            '}' => return false,
            _ => {
                self.separate();
                self.buffer.push(character);
                self.stage = Stage::Bare;
            }
        }
        true
    }

    fn begin_text(&mut self, quote: Quote) {
        self.separate();
        let held = !allows(&self.schema, "string");
        if !held {
            self.json.push('"');
        }
        self.stage = Stage::Text { quote, held };
    }

    fn push_text(&mut self, character: char) {
        match self.stage {
            Stage::Text { held: true, .. } => self.buffer.push(character),
            _ => {
                let quoted = Value::String(character.into()).to_string();
                self.json.push_str(&quoted[1..quoted.len() - 1]);
            }
        }
    }

    fn end_text(&mut self) {
        if let Stage::Escape { quote, held } = self.stage {
            self.stage = Stage::Text { quote, held };
            self.push_text('\\');
        }
        match self.stage {
            Stage::Text { held: true, .. } => {
                let text = std::mem::take(&mut self.buffer);
                let coerced = scalar(text.trim(), &self.schema).unwrap_or_else(|| Value::String(text).to_string());
                self.json.push_str(&coerced);
            }
            _ => self.json.push('"'),
        }
        self.stage = Stage::After;
    }

    fn end_bare(&mut self) {
        let text = std::mem::take(&mut self.buffer);
        let text = text.trim();
        let value = match is_only(&self.schema, "string") {
            true => None,
            false => scalar(text, &self.schema),
        };
        self.json.push_str(&value.unwrap_or_else(|| Value::String(text.into()).to_string()));
        self.stage = Stage::After;
    }
}

/// Whether a schema lets a value be of this type; one that does not say lets it be any.
fn allows(schema: &Value, kind: &str) -> bool {
    // Some write types as Google's own API does.
    let is = |name: &Value| name.as_str().is_some_and(|name| name.eq_ignore_ascii_case(kind));
    match schema.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().any(is),
        Some(only) => is(only),
        None => true,
    }
}

fn is_only(schema: &Value, kind: &str) -> bool {
    schema.get("type").is_some_and(Value::is_string) && allows(schema, kind)
}

/// A number as JSON writes it, whatever its size.
fn is_number(text: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, "0"));
    let whole = whole.strip_prefix('-').unwrap_or(whole);
    let is_plain = whole == "0" || !whole.starts_with('0');
    digits(whole) && is_plain && digits(fraction) && digits(exponent.strip_prefix(['+', '-']).unwrap_or(exponent))
}

/// A number, a truth value or null in JSON, where the text is one, or is nearly one and the schema wants it.
fn scalar(text: &str, schema: &Value) -> Option<String> {
    if is_number(text) || ["true", "false", "null"].contains(&text) {
        return Some(text.into());
    }
    let says = |kind: &str| schema.get("type").is_some() && allows(schema, kind);
    let lower = text.to_lowercase();
    if says("boolean") && ["true", "false"].contains(&lower.as_str()) {
        return Some(lower);
    }
    if says("null") && ["null", "none"].contains(&lower.as_str()) {
        return Some("null".into());
    }
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
    let number = number.filter(|_| says("number") || says("integer"))?;
    match number.fract() == 0.0 && number.abs() < 1e15 {
        true => Some((number as i64).to_string()),
        false => serde_json::Number::from_f64(number).map(|number| number.to_string()),
    }
}
