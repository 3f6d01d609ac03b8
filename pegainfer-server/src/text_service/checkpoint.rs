//! The text side of a checkpoint: tokenizer, chat template, sampling defaults.

use super::encoder::Encoder;
use super::images::{self, ImageReader};
use super::task::Task;
use anyhow::{Context, Result, bail};
use pegainfer_core::logits_processors::{LogitsProcessorParams, LogitsProcessors};
use pegainfer_core::sampling::{SamplingError, SamplingParams};
use pegainfer_images::ImageProcessor;
use pegainfer_model_files::{ModelFiles, gguf};
use pegainfer_models::args::TaskArg;
use pegainfer_terminal::printable::one_line;
use pegainfer_text::{ChatTemplate, Tokenizer};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// The tokenizer, template and sampling defaults of a checkpoint.
pub struct Checkpoint {
    /// Name of the directory, or of the GGUF file without its extension and number: the model's default name.
    pub name: String,
    /// Hugging Face id or absolute path, from which other programs can read the checkpoint; `None` for temporary files.
    pub origin: Option<String>,
    /// Converts between text and token ids.
    pub tokenizer: Arc<Tokenizer>,
    /// Runs the tokenizer on its own threads.
    pub encoder: Encoder,
    /// Renders messages into a prompt; `None` for base models.
    pub template: Option<ChatTemplate>,
    /// Default sampling parameters of requests.
    pub defaults: SamplingDefaults,
    /// What the model is for.
    pub task: Task,
    /// Scales images, if the model reads them; the error if its processor is not supported.
    pub image_processor: Result<ImageProcessor>,
}

/// Sampling parameters of `generation_config.json`, or OpenAI's defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingDefaults {
    /// Divisor of the logits; 0 is greedy.
    pub temperature: f32,
    /// True if the checkpoint names the temperature.
    pub has_temperature: bool,
    /// Number of most likely tokens to keep; 0 keeps all.
    pub top_k: u32,
    /// Nucleus sampling: probability mass to keep.
    pub top_p: f32,
    /// Minimum probability of a kept token, relative to the most likely one.
    pub min_p: f32,
    /// Makes tokens of the text so far less likely; 1 has no effect.
    pub repetition_penalty: f32,
}

impl Default for SamplingDefaults {
    fn default() -> Self {
        Self { temperature: 1.0, has_temperature: false, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

impl Checkpoint {
    /// Reads the checkpoint at `dir`, a folder or GGUF file, for the task that its files say.
    pub fn load(dir: &Path) -> Result<Self> {
        Self::load_for(dir, TaskArg::Auto)
    }

    /// Reads the checkpoint at `dir`, a folder or GGUF file, for this task.
    pub fn load_for(dir: &Path, task: TaskArg) -> Result<Self> {
        let absolute = dir.canonicalize().with_context(|| format!("{} cannot be read", dir.display()))?;
        let name = absolute.file_name().map_or("model".into(), |name| one_line(&name.to_string_lossy()).into_owned());
        let name = gguf::model_name(&name).to_owned();
        let tokenizer = Arc::new(Tokenizer::load(dir)?);
        let task = Task::load(dir, task, &tokenizer)?;
        let encoder = Encoder::start(tokenizer.clone()).context("the tokenizer's threads cannot be started")?;
        let template = ChatTemplate::load(dir)?;
        let defaults = SamplingDefaults::load(dir)?;
        let image_processor = images::processor(dir);
        Ok(Self { name, origin: None, tokenizer, encoder, template, defaults, task, image_processor })
    }

    /// Takes the name and the origin from where the checkpoint was found.
    pub fn with_source(mut self, hub_id: Option<String>, origin: Option<String>) -> Self {
        self.name = hub_id.unwrap_or(self.name);
        self.origin = origin;
        self
    }

    /// Reads images for an engine that reads them, where they have this token. `None` if only text is served.
    pub fn image_reader(&self, token: Option<u32>) -> Option<ImageReader> {
        ImageReader::new(token?, &self.image_processor, self.template.as_ref(), &self.encoder)
    }

    /// Warns at the start if answers would not end at the end of a turn. `eos` are the tokens that end answers.
    pub fn warn_of_endless_answers(&self, eos: &[u32]) {
        if eos.is_empty() {
            log::warn!(
                "no file of the checkpoint names a token that ends a text: answers end at max_tokens or a stop \
                 string; put eos_token_id into generation_config.json"
            );
        } else if let Some((id, text)) = self.turn_end().filter(|(id, _)| !eos.contains(id)) {
            log::warn!(
                "the chat template ends turns with {text:?} (token {id}), which does not end answers: they go on \
                 after it; add {id} to eos_token_id of generation_config.json"
            );
        }
    }

    /// The control token that ends an answer in the chat template, and its text.
    fn turn_end(&self) -> Option<(u32, String)> {
        let end = self.template.as_ref()?.turn_end()?;
        let first = move |tokenizer: &Arc<Tokenizer>| {
            let ids = tokenizer.encode(&end, false).ok()?;
            ids.into_iter().find(|id| tokenizer.is_special(*id)).map(|id| (id, tokenizer.token_text(id)))
        };
        self.encoder.run(first)
    }
}

impl SamplingDefaults {
    fn load(path: &Path) -> Result<Self> {
        let (files, name) = (ModelFiles::open(path)?, "generation_config.json");
        let path = files.path(name);
        let Some(text) = files.read(name)? else { return Ok(Self::default()) };
        let config: Value =
            serde_json::from_str(&text).with_context(|| format!("{} is not valid JSON", path.display()))?;
        Self::parse(&config).with_context(|| format!("{} holds a value that cannot be used", path.display()))
    }

    /// The logits processors of these defaults; `None` if there are none.
    pub fn logits_processors(&self, vocab_size: usize) -> Result<Option<Arc<LogitsProcessors>>, SamplingError> {
        let fields =
            LogitsProcessorParams { repetition_penalty: self.repetition_penalty, ..LogitsProcessorParams::default() };
        LogitsProcessors::new(fields, vocab_size)
    }

    fn parse(config: &Value) -> Result<Self> {
        let number = |name: &str, default: f32| match &config[name] {
            Value::Null => Ok(default),
            value => value.as_f64().map(|n| n as f32).with_context(|| format!("{name} must be a number, got {value}")),
        };
        let defaults = Self::default();
        let top_k = match &config["top_k"] {
            Value::Null => defaults.top_k,
            value => match value.as_i64().map(|k| u32::try_from(k.max(0))) {
                Some(Ok(k)) => k,
                _ => bail!("top_k must be an integer, got {value}"),
            },
        };
        let parsed = Self {
            temperature: number("temperature", defaults.temperature)?,
            has_temperature: !config["temperature"].is_null(),
            top_k,
            top_p: number("top_p", defaults.top_p)?,
            min_p: number("min_p", defaults.min_p)?,
            repetition_penalty: number("repetition_penalty", defaults.repetition_penalty)?,
        };
        SamplingParams::new(parsed.temperature, parsed.top_k, parsed.top_p, parsed.min_p, 0)?;
        parsed.logits_processors(0)?;
        Ok(parsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing as testing;
    use serde_json::json;

    #[test]
    fn the_bundled_checkpoint_loads() {
        let checkpoint = Checkpoint::load(&testing::model_dir()).unwrap();
        assert_eq!(checkpoint.name, "qwen3-tiny");
        assert!(checkpoint.template.is_some());
        let expected = SamplingDefaults { top_k: 20, top_p: 0.95, ..SamplingDefaults::default() };
        let expected = SamplingDefaults { temperature: 0.6, has_temperature: true, ..expected };
        assert_eq!(checkpoint.defaults, expected);
    }

    #[test]
    fn the_token_that_ends_turns_is_found() {
        let checkpoint = Checkpoint::load(&testing::model_dir()).unwrap();
        assert_eq!(checkpoint.turn_end().unwrap(), (4089, "<|im_end|>".to_owned()));
    }

    #[test]
    fn unusable_defaults_are_refused_by_name() {
        assert_eq!(SamplingDefaults::parse(&json!({})).unwrap(), SamplingDefaults::default());
        for (config, field) in [
            (json!({"top_p": 2}), "top_p"),
            (json!({"temperature": "x"}), "temperature"),
            (json!({"repetition_penalty": 0}), "repetition_penalty"),
        ] {
            assert!(SamplingDefaults::parse(&config).unwrap_err().to_string().contains(field));
        }
    }
}
