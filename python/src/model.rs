//! The class `Model`, and the model of the demo.

use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gemma4c::{Completion as Answer, Prompt, Sampling};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyList};

use crate::answer::{Completion, Piece, Stream};
use crate::arguments::{self, Keywords, Prompts, Stops};
use crate::worker::{Pending, Worker, ended, wait};
use crate::{Error, arrays, raised};

/// A model with its weights, ready to answer.
///
/// It is named by a GGUF file, by a plan that `gemma4c compile` wrote, or by its name on Hugging Face's hub, such as
/// ggml-org/gemma-4-E4B-it-GGUF, with a quantisation after a colon if not the best that fits this machine. A model is
/// compiled for this machine the first time, and its plan is kept in the cache.
///
/// Methods may be called from any thread: one computes, the others wait. While one computes, other threads run.
#[pyclass(frozen, module = "gemma4c")]
pub struct Model {
    /// `None` once it is closed. Nobody waits under this lock.
    worker: Mutex<Option<Worker>>,
    facts: Facts,
}

/// What does not change.
struct Facts {
    device: String,
    context: u32,
    vocab_size: u32,
    sequences: u32,
}

impl Facts {
    fn of(model: &gemma4c::Model) -> Facts {
        Facts {
            device: model.device(),
            context: model.context(),
            vocab_size: model.vocab_size(),
            sequences: model.sequences(),
        }
    }
}

impl Model {
    fn worker(&self) -> MutexGuard<'_, Option<Worker>> {
        self.worker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin<T: Send + 'static>(
        &self,
        compute: impl FnOnce(&mut gemma4c::Model, &Sender<Result<T, gemma4c::Error>>) + Send + 'static,
    ) -> PyResult<Pending<T>> {
        self.worker().as_ref().ok_or_else(|| Error::new_err("the model is closed"))?.begin(compute)
    }

    /// Computes something on the model's thread, and waits for it.
    fn run<T: Send + 'static>(
        &self,
        py: Python<'_>,
        compute: impl FnOnce(&mut gemma4c::Model) -> Result<T, gemma4c::Error> + Send + 'static,
    ) -> PyResult<T> {
        let mut pending = self.begin(move |model, results| drop(results.send(compute(model))))?;
        wait(py, &mut pending)?.ok_or_else(ended)
    }

    fn answer(&self, py: Python<'_>, prompt: Prompt, sampling: Sampling) -> PyResult<Completion> {
        self.run(py, move |model| model.generate(prompt, &sampling)).map(Completion::from)
    }

    /// Token ids of a prompt, which is a text or token ids.
    fn ids(&self, py: Python<'_>, name: &str, given: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        match arguments::prompt(name, given)? {
            Prompt::Text(text) => self.run(py, move |model| model.tokenize(&text)),
            Prompt::Tokens(tokens) => Ok(tokens),
            Prompt::Chat(_) | Prompt::Conversation(_) => unreachable!("arguments::prompt reads texts and ids"),
        }
    }
}

/// Sends pieces of an answer as they come, and then the whole; ends where nobody reads them any more.
fn stream_to(
    model: &mut gemma4c::Model,
    prompt: Prompt,
    sampling: &Sampling,
    to: &Sender<Result<Piece, gemma4c::Error>>,
) {
    let streamed = model.stream(prompt, sampling).and_then(|mut stream| {
        for piece in stream.by_ref() {
            if to.send(Ok(Piece::Text(piece?))).is_err() {
                return Ok(None);
            }
        }
        stream.complete().map(Some)
    });
    let last = streamed.map(|answer: Option<Answer>| answer.map(|answer| Piece::Whole(Box::new(answer))));
    // It is nobody's where the reader is gone.
    if let Some(last) = last.transpose() {
        _ = to.send(last);
    }
}

#[pymethods]
#[allow(clippy::too_many_arguments, reason = "they are keywords")]
impl Model {
    #[new]
    #[pyo3(signature = (model, *, device="auto", context=None, sequences=None, kv=None, memory=None, drafter=None,
                        quiet=false))]
    fn new(
        py: Python<'_>,
        model: PathBuf,
        device: &str,
        context: Option<u32>,
        sequences: Option<u32>,
        kv: Option<&str>,
        memory: Option<f64>,
        drafter: Option<&Bound<'_, PyAny>>,
        quiet: bool,
    ) -> PyResult<Model> {
        let mut opener = gemma4c::Model::find(model).device(arguments::device(device)?);
        if let Some(positions) = context {
            opener = opener.context(positions);
        }
        if let Some(count) = sequences {
            opener = opener.sequences(count);
        }
        if let Some(kv) = kv {
            opener = opener.kv(arguments::kv(kv)?);
        }
        if let Some(part) = memory {
            opener = opener.memory(part);
        }
        opener = match drafter {
            None => opener,
            Some(flag) if flag.is_instance_of::<PyBool>() => match flag.extract()? {
                true => opener,
                false => opener.undrafted(),
            },
            Some(file) => opener.drafter(file.extract::<PathBuf>()?),
        };
        if quiet {
            opener = opener.quiet();
        }
        let (worker, facts) = Worker::start(py, move || opener.open(), Facts::of)?;
        Ok(Model { worker: Mutex::new(Some(worker)), facts })
    }

    /// The answer to a prompt, or a list of the answers to many.
    ///
    /// A prompt is a text, which is continued as it stands, or a list of token ids; a list of prompts is a batch: its
    /// answers are computed together, which takes far less time, and each is as if it were alone.
    ///
    /// What is not given is as the model's authors advise; temperature 0 always takes the likeliest token, top_k -1
    /// considers all, max_tokens -1 is as many as the context has room for. The same seed gives the same answer;
    /// without one each answer has its own.
    #[pyo3(signature = (prompt, *, max_tokens=256, temperature=None, top_k=None, top_p=None, seed=None, stop=None))]
    fn generate<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        max_tokens: i64,
        temperature: Option<f32>,
        top_k: Option<i64>,
        top_p: Option<f32>,
        seed: Option<Bound<'py, PyAny>>,
        stop: Option<Stops>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let sampling = Keywords { max_tokens, temperature, top_k, top_p, seed, stop }.sampling()?;
        match arguments::prompts(prompt)? {
            Prompts::One(prompt) => Ok(Bound::new(py, self.answer(py, prompt, sampling)?)?.into_any()),
            Prompts::Many(prompts) => {
                let answers = self.run(py, move |model| model.generate_many(prompts, &sampling))?;
                let answers = answers.into_iter().map(|answer| Bound::new(py, Completion::from(answer)));
                Ok(PyList::new(py, answers.collect::<PyResult<Vec<_>>>()?)?.into_any())
            }
        }
    }

    /// The answer to a prompt as it comes: an iterator over pieces of its text. Settings are those of `generate`.
    #[pyo3(signature = (prompt, *, max_tokens=256, temperature=None, top_k=None, top_p=None, seed=None, stop=None))]
    fn stream(
        &self,
        prompt: &Bound<'_, PyAny>,
        max_tokens: i64,
        temperature: Option<f32>,
        top_k: Option<i64>,
        top_p: Option<f32>,
        seed: Option<Bound<'_, PyAny>>,
        stop: Option<Stops>,
    ) -> PyResult<Stream> {
        let sampling = Keywords { max_tokens, temperature, top_k, top_p, seed, stop }.sampling()?;
        let prompt = arguments::prompt("prompt", prompt)?;
        Ok(Stream::new(self.begin(move |model, to| stream_to(model, prompt, &sampling, to))?))
    }

    /// The assistant's next message in a conversation, through the model's own chat template.
    ///
    /// Messages and tools are dictionaries as in OpenAI's chat API: {"role": "user", "content": "..."}, tools with a
    /// function's name, description and JSON schema; calls of tools are in `tool_calls` of the answer. With thinking
    /// the model may think first (`thoughts`). Settings are those of `generate`.
    #[pyo3(signature = (messages, *, tools=None, thinking=false, max_tokens=256, temperature=None, top_k=None, top_p=None,
                        seed=None, stop=None))]
    fn chat(
        &self,
        py: Python<'_>,
        messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        thinking: bool,
        max_tokens: i64,
        temperature: Option<f32>,
        top_k: Option<i64>,
        top_p: Option<f32>,
        seed: Option<Bound<'_, PyAny>>,
        stop: Option<Stops>,
    ) -> PyResult<Completion> {
        let sampling = Keywords { max_tokens, temperature, top_k, top_p, seed, stop }.sampling()?;
        self.answer(py, Prompt::Conversation(arguments::conversation(messages, tools, thinking)?), sampling)
    }

    /// The logits after each token of a prompt: a float32 array of a row for each token and a column for each of the
    /// vocabulary.
    fn logits<'py>(&self, py: Python<'py>, prompt: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let tokens = self.ids(py, "prompt", prompt)?;
        let rows = self.run(py, move |model| model.logits(&tokens))?;
        arrays::floats(py, &[rows.len(), self.facts.vocab_size as usize], rows.iter().map(Vec::as_slice))
    }

    /// The residual before, between and after the layers: a float32 array of layers + 1 tables, each with a row for each
    /// token of the prompt. Table 0 is the embedding, table i what layer i gives to the next, and the last is
    /// normalised, as the LM head reads it. The CPU computes them in float32, also where a GPU runs the model.
    fn hidden_states<'py>(&self, py: Python<'py>, prompt: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let tokens = self.ids(py, "prompt", prompt)?;
        let states = self.run(py, move |model| model.hidden_states(&tokens))?;
        let values = std::iter::once(states.values.as_slice());
        arrays::floats(py, &[states.tables, states.tokens, states.width], values)
    }

    /// How well the model predicts a text, as `gemma4c perplexity` has it: the text is cut into windows of so many
    /// tokens, and the second half of each is scored.
    #[pyo3(signature = (text, *, window=512))]
    fn perplexity(&self, py: Python<'_>, text: String, window: usize) -> PyResult<f64> {
        self.run(py, move |model| model.perplexity(&text, window)).map(|found| found.value())
    }

    /// Token ids of a text, behind the one that begins a sequence. Markers in it are text.
    fn tokenize(&self, py: Python<'_>, text: String) -> PyResult<Vec<u32>> {
        self.run(py, move |model| model.tokenize(&text))
    }

    /// The text of token ids, without control tokens.
    fn detokenize(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<String> {
        let tokens = arguments::tokens("tokens", tokens)?;
        self.run(py, move |model| model.detokenize(&tokens))
    }

    /// What runs it: "cpu", or what the driver calls the GPU.
    #[getter]
    fn device(&self) -> &str {
        &self.facts.device
    }

    /// Positions that a sequence may have, its prompt and its answer together.
    #[getter]
    fn context(&self) -> u32 {
        self.facts.context
    }

    /// Tokens of the vocabulary.
    #[getter]
    fn vocab_size(&self) -> u32 {
        self.facts.vocab_size
    }

    /// Sequences that are computed at once, at most.
    #[getter]
    fn sequences(&self) -> u32 {
        self.facts.sequences
    }

    /// Ends what is computed, and gives the memory back. A `with` statement does the same at its end.
    fn close(&self, py: Python<'_>) {
        let worker = self.worker().take();
        py.detach(move || drop(worker));
    }

    fn __enter__(model: Py<Self>) -> Py<Self> {
        model
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let Facts { device, context, sequences, .. } = &self.facts;
        format!("Model(on {device}, context {context}, {sequences} sequences)")
    }
}

/// Writes the model of `gemma4c demo` to a folder, and returns its path: 11 million parameters that have read Jane Austen
/// and nothing else.
#[pyfunction]
pub fn demo_model(py: Python<'_>, folder: PathBuf) -> PyResult<String> {
    let path = py.detach(|| gemma4c::demo_model(folder)).map_err(raised)?;
    Ok(path.to_string_lossy().into_owned())
}
