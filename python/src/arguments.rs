//! Arguments of Python's calls as the library takes them. What is wrong is named by the argument.

use gemma4c::{Conversation, Device, KvType, Prompt, Sampling};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyString};
use serde_json::Value;

use crate::Error;

/// What an answer is asked for.
pub enum Prompts {
    One(Prompt),
    Many(Vec<Prompt>),
}

/// A text or a list of token ids is one prompt; a list of those is many.
pub fn prompts(given: &Bound<'_, PyAny>) -> PyResult<Prompts> {
    if let Ok(text) = given.cast::<PyString>() {
        return Ok(Prompts::One(Prompt::Text(text.extract()?)));
    }
    let items = items("prompt", given)?;
    match items.first() {
        Some(first) if is_number(first) => Ok(Prompts::One(Prompt::Tokens(ids("prompt", &items)?))),
        _ => {
            let one = |(index, item)| prompt(&format!("prompt[{index}]"), item);
            Ok(Prompts::Many(items.iter().enumerate().map(one).collect::<PyResult<_>>()?))
        }
    }
}

/// A text, or token ids.
pub fn prompt(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Prompt> {
    match given.cast::<PyString>() {
        Ok(text) => Ok(Prompt::Text(text.extract()?)),
        Err(_) => Ok(Prompt::Tokens(tokens(name, given)?)),
    }
}

pub fn tokens(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    ids(name, &items(name, given)?)
}

fn items<'py>(name: &str, given: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let wrong = |_| Error::new_err(format!("{name} is neither a text nor a list"));
    given.try_iter().map_err(wrong)?.collect()
}

/// Also what numpy has for one.
fn is_number(item: &Bound<'_, PyAny>) -> bool {
    item.is_instance_of::<PyInt>() || item.hasattr("__index__").unwrap_or(false)
}

fn ids(name: &str, items: &[Bound<'_, PyAny>]) -> PyResult<Vec<u32>> {
    let id = |(index, item): (usize, &Bound<'_, PyAny>)| {
        let wrong = || Error::new_err(format!("{name}[{index}]: {} is no token id", text_of(item)));
        if item.is_instance_of::<PyBool>() { Err(wrong()) } else { item.extract::<u32>().map_err(|_| wrong()) }
    };
    items.iter().enumerate().map(id).collect()
}

fn text_of(item: &Bound<'_, PyAny>) -> String {
    item.repr().map_or_else(|_| "it".into(), |text| text.to_string())
}

/// One text that ends an answer, or several.
#[derive(FromPyObject)]
pub enum Stops {
    One(String),
    Many(Vec<String>),
}

/// The keywords of all that generates.
pub struct Keywords<'py> {
    pub max_tokens: i64,
    pub temperature: Option<f32>,
    pub top_k: Option<i64>,
    pub top_p: Option<f32>,
    pub seed: Option<Bound<'py, PyAny>>,
    pub stop: Option<Stops>,
}

impl Keywords<'_> {
    pub fn sampling(self) -> PyResult<Sampling> {
        let stop = match self.stop {
            None => Vec::new(),
            Some(Stops::One(text)) => vec![text],
            Some(Stops::Many(texts)) => texts,
        };
        if stop.iter().any(String::is_empty) {
            return Err(Error::new_err("stop: an empty text ends every answer before it begins"));
        }
        Ok(Sampling {
            temperature: self.temperature,
            top_k: self.top_k.map(|count| counted("top_k", count, 0)).transpose()?,
            top_p: self.top_p,
            seed: self.seed.as_ref().map(seed).transpose()?,
            max_tokens: counted("max_tokens", self.max_tokens, u32::MAX)?,
            stop,
        })
    }
}

/// A count, where -1 stands for all.
fn counted(name: &str, count: i64, all: u32) -> PyResult<u32> {
    match (count, u32::try_from(count)) {
        (-1, _) => Ok(all),
        (_, Ok(count)) => Ok(count),
        _ => Err(Error::new_err(format!("{name} {count} is no count, nor -1 for all"))),
    }
}

/// A seed may be negative: all 64 bits count.
fn seed(given: &Bound<'_, PyAny>) -> PyResult<u64> {
    let negative = || given.extract::<i64>().map(|seed| seed as u64);
    let wrong = |_| Error::new_err(format!("seed {} is no whole number of 64 bits", text_of(given)));
    given.extract::<u64>().or_else(|_| negative()).map_err(wrong)
}

pub fn device(name: &str) -> PyResult<Device> {
    match name {
        "auto" => Ok(Device::Auto),
        "cuda" => Ok(Device::Cuda),
        "cpu" => Ok(Device::Cpu),
        "sim" => Ok(Device::Sim),
        other => Err(Error::new_err(format!("device {other:?}: there are auto, cuda, cpu and sim"))),
    }
}

pub fn kv(name: &str) -> PyResult<KvType> {
    let known = [KvType::F16, KvType::BF16, KvType::F32, KvType::Q8_0, KvType::Fp8];
    known.into_iter().find(|kv| kv.name() == name).ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|kv| kv.name()).collect();
        Error::new_err(format!("kv {name:?}: there are {}", names.join(", ")))
    })
}

/// A conversation of dictionaries, by way of JSON.
pub fn conversation(
    messages: &Bound<'_, PyAny>,
    tools: Option<&Bound<'_, PyAny>>,
    thinking: bool,
) -> PyResult<Conversation> {
    let tools = tools.map_or(Ok(Value::Null), |tools| json("tools", tools))?;
    Ok(Conversation { messages: json("messages", messages)?, tools, thinking })
}

fn json(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Value> {
    let text = given.py().import("json")?.call_method1("dumps", (given,));
    let text: String = text.map_err(|error| Error::new_err(format!("{name} is no JSON: {error}")))?.extract()?;
    serde_json::from_str(&text).map_err(|error| Error::new_err(format!("{name} is no JSON: {error}")))
}
