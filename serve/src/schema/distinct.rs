//! Items that must differ from each other (`uniqueItems`), and names that are counted (`minProperties`): what a grammar
//! cannot say.
//!
//! A [`Watch`] reads an answer as it grows, in JSON or in the notation of a call, next to the forms of its schema, and
//! knows the items so far. It says of each token that could come whether it would repeat one. Where all items are known
//! (an enumeration, a few whole numbers), it says so at the first character that leads to nothing new; where they are
//! not, when an item would end as one that was there.

use std::sync::Arc;

use serde_json::Value;

use super::form::{Form, Schema};
use super::text::Pattern;

/// Values of a list's items that are told one by one.
const MOST_VALUES: usize = 256;
const DEEPEST: usize = 64;

/// All values of a form as JSON, where they are few and have one spelling each.
pub(super) fn values(form: &Form, defined: &[Form], depth: usize) -> Option<Vec<String>> {
    if depth > DEEPEST {
        return None;
    }
    let found = match form {
        Form::Null => vec!["null".into()],
        Form::Boolean(None) => vec!["true".into(), "false".into()],
        Form::Boolean(Some(only)) => vec![only.to_string()],
        Form::Number(number) => match (&number.only, number.least, number.most) {
            (Some(only), ..) => vec![only.as_i64()?.to_string()],
            (None, Some(least), Some(most)) if number.whole && number.multiple.is_none() => {
                let count = most.value - least.value + 1.0;
                (0.0..=MOST_VALUES as f64).contains(&count).then_some(())?;
                (least.value as i64..=most.value as i64).map(|value| value.to_string()).collect()
            }
            _ => return None,
        },
        Form::Text(text) => vec![Value::from(text.only.as_deref()?).to_string()],
        Form::Either(forms) => {
            let all: Option<Vec<Vec<String>>> = forms.iter().map(|form| values(form, defined, depth + 1)).collect();
            all?.concat()
        }
        Form::Refer(index) => return values(defined.get(*index)?, defined, depth + 1),
        _ => return None,
    };
    let mut found = found;
    found.sort();
    found.dedup();
    (found.len() <= MOST_VALUES).then_some(found)
}

/// A schema's forms by number, as far as lists and objects are concerned.
#[derive(Debug)]
pub struct Table {
    nodes: Vec<Node>,
}

#[derive(Debug)]
enum Node {
    Scalar,
    Either(Vec<usize>),
    List { first: Vec<usize>, rest: usize, distinct: bool, values: Option<Arc<[String]>> },
    Object { properties: Vec<(String, usize)>, patterns: Vec<(Pattern, usize)>, others: usize, distinct: bool },
}

impl Table {
    /// Of a schema in which something must be distinct; the first node is the whole value.
    pub fn new(schema: &Schema) -> Option<Table> {
        if !schema.has_distinct() {
            return None;
        }
        let mut table = Table { nodes: Vec::new() };
        // The root, then the definitions, so that references are known before they are met.
        let forms: Vec<&Form> = [&schema.form].into_iter().chain(&schema.defined).collect();
        forms.iter().for_each(|_| table.nodes.push(Node::Scalar));
        for (index, form) in forms.into_iter().enumerate() {
            table.nodes[index] = table.node(form, schema);
        }
        Some(table)
    }

    fn add(&mut self, form: &Form, schema: &Schema) -> usize {
        let node = self.node(form, schema);
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    fn node(&mut self, form: &Form, schema: &Schema) -> Node {
        match form {
            Form::Either(forms) => Node::Either(forms.iter().map(|form| self.add(form, schema)).collect()),
            Form::Refer(index) => Node::Either(vec![index + 1]),
            Form::List(list) => Node::List {
                first: list.first.iter().map(|form| self.add(form, schema)).collect(),
                rest: self.add(&list.rest, schema),
                distinct: list.distinct,
                values: match list.distinct && list.first.is_empty() {
                    true => values(&list.rest, &schema.defined, 0).map(Arc::from),
                    false => None,
                },
            },
            Form::Object(object) => Node::Object {
                properties: object
                    .properties
                    .iter()
                    .map(|(name, form)| (name.clone(), self.add(form, schema)))
                    .collect(),
                patterns: object.patterns.iter().map(|(one, form)| (one.clone(), self.add(form, schema))).collect(),
                others: self.add(&object.others, schema),
                distinct: object.counts_others(),
            },
            _ => Node::Scalar,
        }
    }

    /// With neither references nor alternatives.
    fn plain(&self, nodes: Vec<usize>) -> Vec<usize> {
        let (mut open, mut found, mut seen) = (nodes, Vec::new(), Vec::new());
        while let Some(node) = open.pop() {
            match &self.nodes[node] {
                _ if seen.contains(&node) => continue,
                Node::Either(nodes) => open.extend(nodes),
                _ => found.push(node),
            }
            seen.push(node);
        }
        found
    }
}

/// How an answer is written.
#[derive(Clone, Debug)]
pub enum Notation {
    Json(Arc<Table>),
    /// The tools that may be called, with the tables of those that need one.
    Call(Arc<[(String, Option<Arc<Table>>)]>),
}

/// A list or an object that is open.
#[derive(Clone, Debug)]
struct Level {
    is_object: bool,
    nodes: Vec<usize>,
    distinct: bool,
    values: Option<Arc<[String]>>,
    /// Items or names so far, each in one spelling.
    seen: Vec<String>,
    items: usize,
    key: String,
    /// Where the item or the name begins that is being written.
    start: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    /// Before the arguments of a call.
    Head,
    Value,
    Key,
    Text {
        is_key: bool,
        is_escaped: bool,
    },
    Bare,
    After,
}

/// One token, as far as this matters.
#[derive(Clone, Copy, Debug)]
pub enum Token<'a> {
    Bytes(&'a [u8]),
    Quote,
}

/// What has been written, and what must not come again.
#[derive(Clone, Debug)]
pub struct Watch {
    notation: Notation,
    table: Option<Arc<Table>>,
    stage: Stage,
    levels: Vec<Level>,
    /// The value so far in JSON, without white space.
    written: Vec<u8>,
}

impl Watch {
    pub fn new(notation: Notation) -> Watch {
        let (table, stage) = match &notation {
            Notation::Json(table) => (Some(Arc::clone(table)), Stage::Value),
            Notation::Call(_) => (None, Stage::Head),
        };
        Watch { notation, table, stage, levels: Vec::new(), written: Vec::new() }
    }

    /// Whether a token could repeat something.
    pub fn is_needed(&self) -> bool {
        self.levels.iter().any(|level| level.distinct && (!level.seen.is_empty() || level.values.is_some()))
    }

    /// Whether a string or a bare name is open, in which only its end can repeat something.
    pub fn is_in_free_text(&self) -> bool {
        let is_free = self.levels.last().is_none_or(|level| level.values.is_none());
        is_free && (matches!(self.stage, Stage::Text { .. }) || (self.stage == Stage::Key && self.is_call()))
    }

    /// Whether a token could end what is open.
    pub fn may_end(&self, token: Token<'_>) -> bool {
        match token {
            Token::Quote => true,
            Token::Bytes(bytes) if self.is_call() => self.stage == Stage::Key && bytes.contains(&b':'),
            Token::Bytes(bytes) => bytes.contains(&b'"'),
        }
    }

    /// What would make an item or a name that was there of the one that is open, up to its end.
    pub fn remainders(&self) -> Vec<&[u8]> {
        let Some(level) = self.levels.last().filter(|level| level.distinct && level.values.is_none()) else {
            return Vec::new();
        };
        let is_bare_key = self.stage == Stage::Key && self.is_call();
        let is_open = is_bare_key || matches!(self.stage, Stage::Text { .. } | Stage::Bare);
        let so_far = self.written.get(level.start..).unwrap_or_default();
        let seen = level.seen.iter().filter(|_| is_open).filter_map(|seen| {
            let seen = seen.as_bytes();
            let seen = if is_bare_key { seen.strip_prefix(b"\"")? } else { seen };
            let rest = seen.strip_prefix(so_far)?;
            Some(rest.strip_suffix(b"\"").unwrap_or(rest))
        });
        seen.collect()
    }

    /// Takes a token; `false` where it repeats what must not come again.
    #[must_use]
    pub fn push(&mut self, token: Token<'_>) -> bool {
        match token {
            Token::Quote => self.quote(),
            Token::Bytes(bytes) => bytes.iter().all(|byte| self.byte(*byte)),
        }
    }

    fn is_call(&self) -> bool {
        matches!(self.notation, Notation::Call(_))
    }

    fn quote(&mut self) -> bool {
        match self.stage {
            Stage::Text { is_key, .. } => self.end_text(is_key),
            Stage::Key | Stage::Value => {
                self.begin_text();
                true
            }
            _ => true,
        }
    }

    fn begin_text(&mut self) {
        let is_key = self.stage == Stage::Key;
        self.written.push(b'"');
        self.stage = Stage::Text { is_key, is_escaped: false };
    }

    fn end_text(&mut self, is_key: bool) -> bool {
        self.written.push(b'"');
        self.stage = Stage::After;
        match is_key {
            true => self.end_name(),
            false => self.leads_on() && self.end_value(),
        }
    }

    fn byte(&mut self, byte: u8) -> bool {
        let is_call = self.is_call();
        match self.stage {
            Stage::Head => {
                self.written.push(byte);
                if byte == b'{' {
                    return self.begin_call();
                }
                true
            }
            Stage::Text { is_key, is_escaped } => {
                if !is_call && !is_escaped && byte == b'"' {
                    return self.end_text(is_key);
                }
                match is_call {
                    // As JSON spells it; a character in parts is left as it is.
                    true if byte == b'"' || byte == b'\\' || byte < 0x20 => {
                        let quoted = Value::from(char::from(byte).to_string()).to_string();
                        self.written.extend(&quoted.as_bytes()[1..quoted.len() - 1]);
                    }
                    _ => self.written.push(byte),
                }
                self.stage = Stage::Text { is_key, is_escaped: !is_call && !is_escaped && byte == b'\\' };
                is_key || self.leads_on()
            }
            _ if byte.is_ascii_whitespace() => self.end_bare(),
            Stage::Key if byte == b'"' && !is_call => {
                self.begin_text();
                true
            }
            Stage::Key if byte == b':' => {
                self.written.insert(self.levels.last().map_or(0, |level| level.start), b'"');
                self.written.push(b'"');
                self.end_name() && self.begin_property()
            }
            Stage::Key if byte != b'}' => {
                self.written.push(byte);
                true
            }
            Stage::Value if byte == b'"' => {
                self.begin_text();
                self.leads_on()
            }
            _ => self.structure(byte),
        }
    }

    fn structure(&mut self, byte: u8) -> bool {
        match byte {
            b'{' | b'[' => {
                self.open(byte == b'{');
                true
            }
            b'}' | b']' => self.end_bare() && self.close(byte),
            b',' => {
                let ended = self.end_bare();
                self.written.push(b',');
                let start = self.written.len();
                if let Some(level) = self.levels.last_mut() {
                    level.start = start;
                    self.stage = if level.is_object { Stage::Key } else { Stage::Value };
                }
                ended
            }
            b':' => self.begin_property(),
            _ => {
                self.written.push(byte);
                self.stage = Stage::Bare;
                self.leads_on()
            }
        }
    }

    /// The name of the function is known.
    fn begin_call(&mut self) -> bool {
        let head = String::from_utf8_lossy(&self.written).into_owned();
        let name = head.trim_start_matches("call:").trim_end_matches('{');
        if let Notation::Call(tools) = &self.notation {
            self.table = tools.iter().find(|(tool, _)| tool == name).and_then(|(_, table)| table.clone());
        }
        self.written.clear();
        self.stage = Stage::Value;
        self.structure(b'{')
    }

    /// The forms of the value that begins now.
    fn expected(&self, table: &Table) -> Vec<usize> {
        let Some(level) = self.levels.last() else { return table.plain(vec![0]) };
        let next = |node: &usize| match &table.nodes[*node] {
            Node::List { first, rest, .. } => vec![*first.get(level.items).unwrap_or(rest)],
            Node::Object { properties, patterns, others, .. } => {
                let listed = properties.iter().find(|(name, _)| *name == level.key).map(|(_, node)| *node);
                let matching =
                    || patterns.iter().find(|(pattern, _)| pattern.matches(&level.key)).map(|(_, node)| *node);
                vec![listed.or_else(matching).unwrap_or(*others)]
            }
            _ => Vec::new(),
        };
        table.plain(level.nodes.iter().flat_map(next).collect())
    }

    fn open(&mut self, is_object: bool) {
        let mut level = Level {
            is_object,
            nodes: Vec::new(),
            distinct: false,
            values: None,
            seen: Vec::new(),
            items: 0,
            key: String::new(),
            start: self.written.len() + 1,
        };
        if let Some(table) = self.table.clone() {
            for node in self.expected(&table) {
                match &table.nodes[node] {
                    Node::List { distinct, values, .. } if !is_object => {
                        level.values = values.clone().filter(|_| level.nodes.is_empty());
                        level.distinct |= distinct;
                        level.nodes.push(node);
                    }
                    Node::Object { distinct, .. } if is_object => {
                        level.distinct |= distinct;
                        level.nodes.push(node);
                    }
                    _ => {}
                }
            }
        }
        self.written.push(if is_object { b'{' } else { b'[' });
        self.levels.push(level);
        self.stage = if is_object { Stage::Key } else { Stage::Value };
    }

    fn close(&mut self, byte: u8) -> bool {
        self.written.push(byte);
        self.levels.pop();
        self.stage = Stage::After;
        self.end_value()
    }

    fn end_bare(&mut self) -> bool {
        match self.stage {
            Stage::Bare => {
                self.stage = Stage::After;
                self.end_value()
            }
            _ => true,
        }
    }

    /// A name is complete: one that counts must not have been there.
    fn end_name(&mut self) -> bool {
        let Some(level) = self.levels.last_mut() else { return true };
        let name = String::from_utf8_lossy(&self.written[level.start..]).into_owned();
        level.key = serde_json::from_str(&name).unwrap_or(name);
        let name = Value::from(level.key.as_str()).to_string();
        let is_new = !level.distinct || !level.seen.contains(&name);
        level.seen.push(name);
        is_new
    }

    fn begin_property(&mut self) -> bool {
        self.written.push(b':');
        self.stage = Stage::Value;
        true
    }

    /// A value is complete: an item must not have been there.
    fn end_value(&mut self) -> bool {
        let Some(level) = self.levels.last_mut().filter(|level| !level.is_object) else { return true };
        level.items += 1;
        if !level.distinct {
            return true;
        }
        let item = String::from_utf8_lossy(&self.written[level.start..]).into_owned();
        let item = serde_json::from_str(&item).map_or(item, |value| spelling(&value));
        let is_new = !level.seen.contains(&item);
        level.seen.push(item);
        is_new
    }

    /// Whether the item that is being written can still become one that was not there.
    fn leads_on(&self) -> bool {
        let Some(level) = self.levels.last() else { return true };
        let Some(values) = &level.values else { return true };
        let so_far = &self.written[level.start..];
        values.iter().any(|value| value.as_bytes().starts_with(so_far) && !level.seen.contains(value))
    }
}

/// A value in the one way that equal values are written.
fn spelling(value: &Value) -> String {
    match value {
        Value::Number(number) => match number.as_f64().filter(|number| number.fract() == 0.0 && number.abs() < 1e15) {
            Some(whole) => (whole as i64).to_string(),
            None => number.as_f64().map_or(number.to_string(), |number| number.to_string()),
        },
        Value::Array(items) => format!("[{}]", items.iter().map(spelling).collect::<Vec<_>>().join(",")),
        Value::Object(fields) => {
            let mut fields: Vec<String> = fields
                .iter()
                .map(|(name, value)| format!("{}:{}", Value::from(name.as_str()), spelling(value)))
                .collect();
            fields.sort();
            format!("{{{}}}", fields.join(","))
        }
        other => other.to_string(),
    }
}
