//! Python's spelling of values, where minijinja's differs.

use std::io::{self, Write};

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, Value, escape_formatter};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// Prints a value into the output.
pub(super) fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match f64::try_from(value.clone()) {
        Ok(number) if value.kind() == ValueKind::Number && !value.is_integer() => {
            out.write_str(&float(number)).map_err(Error::from)
        }
        _ => escape_formatter(out, state, value),
    }
}

/// The shortest decimal that reads back as the number; exponents have a sign and at least two digits.
fn float(number: f64) -> String {
    let text = format!("{number:?}");
    match text.split_once('e') {
        Some((mantissa, exponent)) => match exponent.strip_prefix('-') {
            Some(digits) => format!("{mantissa}e-{digits:0>2}"),
            None => format!("{mantissa}e+{exponent:0>2}"),
        },
        None => text,
    }
}

/// The filter `tojson`: as `json.dumps` with `ensure_ascii=False`, where `indent` may be given.
pub(super) fn to_json(value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<u8> = kwargs.get("indent")?;
    kwargs.assert_all_used()?;
    let failed = |error: &dyn std::fmt::Display| Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut json = Vec::new();
    let style = JsonStyle { indent, depth: 0, is_empty: true };
    value.serialize(&mut Serializer::with_formatter(&mut json, style)).map_err(|error| failed(&error))?;
    String::from_utf8(json).map_err(|error| failed(&error))
}

/// `[1, {"a": 2.0}]`, or one item a line.
struct JsonStyle {
    indent: Option<u8>,
    depth: usize,
    /// Whether the list or map that was opened last has no item yet.
    is_empty: bool,
}

impl JsonStyle {
    fn open(&mut self, writer: &mut (impl Write + ?Sized), bracket: u8) -> io::Result<()> {
        self.depth += 1;
        self.is_empty = true;
        writer.write_all(&[bracket])
    }

    fn close(&mut self, writer: &mut (impl Write + ?Sized), bracket: u8) -> io::Result<()> {
        self.depth -= 1;
        if !self.is_empty {
            self.break_line(writer)?;
        }
        self.is_empty = false;
        writer.write_all(&[bracket])
    }

    fn item(&mut self, writer: &mut (impl Write + ?Sized), first: bool) -> io::Result<()> {
        self.is_empty = false;
        match (first, self.indent) {
            (true, _) => {}
            (false, None) => writer.write_all(b", ")?,
            (false, Some(_)) => writer.write_all(b",")?,
        }
        self.break_line(writer)
    }

    fn break_line(&self, writer: &mut (impl Write + ?Sized)) -> io::Result<()> {
        let Some(indent) = self.indent else { return Ok(()) };
        writer.write_all(b"\n")?;
        (0..self.depth * usize::from(indent)).try_for_each(|_| writer.write_all(b" "))
    }
}

impl Formatter for JsonStyle {
    fn write_f64<W: ?Sized + Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(float(value).as_bytes())
    }

    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b'[')
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b']')
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.item(writer, first)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b'{')
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b'}')
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.item(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
