//! Everything that knows Gemma 4 and its files: what comes before a graph, and what turns text into its tokens.
//!
//! - `gguf` reads and writes model files, and knows no model; `checkpoint` presents folders of safetensors as such;
//! - `gemma4` reads a configuration from such a file and declares the forward pass: the only place in the project that
//!   names a model's parts;
//! - `tokenizer` and `chat` are the text side, made from the file's own vocabulary and template; `text` finds
//!   characters and stop strings in text that comes in pieces;
//! - `media` is the picture side: files to the patches that a tower reads;
//! - `synth` writes random models of the real shapes.
//!
//! Nothing here runs a model or chooses a kernel. Files, vocabularies and templates are not trusted: each module says
//! what it checks and what it limits.

pub mod chat;
pub mod checkpoint;
pub mod gemma4;
pub mod gguf;
pub mod media;
pub mod synth;
pub mod text;
pub mod tokenizer;
