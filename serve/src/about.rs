//! What a plan says of its model, for those who list models. What it does not say is not made up: the licence, the day
//! the weights were made, and the name of a mixture of quantisations are in no plan.

use std::collections::BTreeMap;

use gemma4c_plan::Plan;

/// A model, as far as its plan describes it.
#[derive(Clone, Debug)]
pub struct About {
    pub architecture: String,
    pub name: Option<String>,
    /// Where the compiler found the model's first file.
    pub path: Option<String>,
    /// Numbers in its tensors, drafters and towers included as far as they share its files.
    pub parameters: u64,
    /// Of its files.
    pub bytes: u64,
    /// The format that most bytes of its weights have, such as `Q4_K`.
    pub quantization: Option<String>,
    pub layers: u32,
    pub hidden: u32,
    /// What it was trained for, which may be more than what it was compiled for.
    pub trained_context: u32,
    pub template: Option<String>,
    pub bos: String,
    pub eos: String,
}

impl About {
    pub fn new(plan: &Plan) -> About {
        let model = &plan.model;
        let mut bytes_of: BTreeMap<&str, u64> = BTreeMap::new();
        for weight in &plan.weights {
            *bytes_of.entry(weight.dtype.name()).or_default() += weight.bytes;
        }
        let most = bytes_of.into_iter().max_by_key(|(_, bytes)| *bytes);
        let spelled = |id: Option<u32>| {
            let vocab = plan.vocab.as_ref()?;
            Some(vocab.tokens.get(id? as usize)?.to_owned())
        };
        let vocab = plan.vocab.as_ref();
        About {
            architecture: model.architecture.clone(),
            name: model.name.clone(),
            path: model.files.first().map(|file| file.path.clone()),
            parameters: plan.weights.iter().map(|weight| weight.dims.iter().product::<u64>()).sum(),
            bytes: model.files.iter().map(|file| file.bytes).sum(),
            quantization: most.map(|(name, _)| name.to_uppercase()),
            layers: model.layers,
            hidden: model.hidden,
            trained_context: model.trained_context,
            template: vocab.and_then(|vocab| vocab.chat_template.clone()),
            bos: spelled(vocab.and_then(|vocab| vocab.bos)).unwrap_or_default(),
            eos: spelled(vocab.and_then(|vocab| vocab.eos)).unwrap_or_default(),
        }
    }

    /// The number of parameters for people: `8.0B`.
    pub fn size(&self) -> String {
        let count = self.parameters as f64;
        match self.parameters {
            1_000_000_000.. => format!("{:.1}B", count / 1e9),
            1_000_000.. => format!("{:.1}M", count / 1e6),
            1_000.. => format!("{:.1}K", count / 1e3),
            few => few.to_string(),
        }
    }

    /// Whether the template looks at something that a request may have.
    pub fn template_reads(&self, word: &str) -> bool {
        self.template.as_ref().is_some_and(|template| template.contains(word))
    }
}
