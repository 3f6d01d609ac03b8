//! The lines of a recording: JSON objects, starting with the header.

use super::Prompts;
use anyhow::{Result, anyhow};
use pegainfer_core::engine::GenerateRequest;
use pegainfer_core::images::ImageSpan;
use pegainfer_core::logits_processors::{LogitsProcessorParams, LogitsProcessors};
use pegainfer_core::sampling::SamplingParams;
use pegainfer_core::schedule::recording::{QueuedImage, ScheduleEvent};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use std::str::FromStr;
use std::sync::Arc;

/// Version of the format.
///
/// Version 2 has [`Added::choice_of`]. Files of version 1 can also be read.
pub const VERSION: u32 = 2;

/// The first line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// [`VERSION`].
    pub record: u32,
    /// Name of the model.
    pub model: String,
    /// Version of the program.
    pub version: String,
    /// Recorded content of prompts.
    pub prompts: Prompts,
}

/// Any other line.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum RecordLine {
    /// A request was submitted.
    Added(Box<Added>),
    /// A request ended.
    Ended(Ended),
    /// Lines are missing, because the disk could not keep up.
    Gap {
        /// Number of lines.
        gap: u64,
    },
    /// An input or plan of the engine's scheduler, with `--record-steps`.
    Schedule(ScheduleLine),
}

/// An event of an engine's schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScheduleLine {
    /// Number of the engine, with `--data-parallel-size`.
    #[serde(default, skip_serializing_if = "is_first")]
    pub engine_number: usize,
    /// The event.
    #[serde(flatten)]
    pub event: ScheduleEvent,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_first(engine: &usize) -> bool {
    *engine == 0
}

impl FromStr for RecordLine {
    type Err = serde_json::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        /// The field that identifies the kind of line.
        #[derive(Deserialize)]
        struct Kind {
            add: Option<IgnoredAny>,
            end: Option<IgnoredAny>,
            gap: Option<u64>,
        }
        match serde_json::from_str(text)? {
            Kind { add: Some(_), .. } => Ok(Self::Added(serde_json::from_str(text)?)),
            Kind { end: Some(_), .. } => Ok(Self::Ended(serde_json::from_str(text)?)),
            Kind { gap: Some(gap), .. } => Ok(Self::Gap { gap }),
            _ => Ok(Self::Schedule(serde_json::from_str(text)?)),
        }
    }
}

/// A request. With [`Prompts::Ids`], it contains everything that determines its tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Added {
    /// Seconds since the server was ready.
    pub t: f64,
    /// Number of the request.
    pub add: u64,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Maximum number of tokens to generate.
    pub max_tokens: usize,
    /// Lower numbers leave the queue first.
    pub priority: i32,
    /// The prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<Vec<u32>>,
    /// Images of the prompt, next to `ids`. Their pixels are not recorded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<QueuedImage>,
    /// Hashes of the prompt's complete blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hashes: Option<Vec<String>>,
    /// The first choice of the same HTTP request. Its line contains the prompt and the parameters, which are the same
    /// except for the seed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choice_of: Option<u64>,
    /// Seed of this choice, next to `choice_of` if prompts are recorded as ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Present with `ids`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<Parameters>,
}

/// Parameters of a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Parameters {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    seed: u64,
    stop_token_ids: Vec<u32>,
    ignore_eos: bool,
    cache_salt: u64,
    logits_processors: Option<LogitsProcessorParams>,
    /// Its source, see [`Grammar::source`](pegainfer_core::grammar::Grammar::source).
    pub grammar: Option<String>,
}

/// The end of a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    /// Seconds since the server was ready.
    pub t: f64,
    /// Number of the request.
    pub end: u64,
    /// Number of tokens that the server received.
    pub tokens: usize,
    /// Why the request ended.
    pub reason: Reason,
    /// Hash of the tokens, see [`TokenHash`](super::TokenHash).
    pub hash: String,
    /// Hashes of the complete blocks after those of the prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hashes: Option<Vec<String>>,
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reason {
    /// An end-of-text or stop token.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
    /// The server cancelled it: the client left, a stop string was found, or a deadline passed.
    Cancelled,
    /// The engine or the grammar failed.
    Failed,
}

impl Added {
    /// A request at time `t`, with the content that `prompts` allows.
    pub fn new(t: f64, add: u64, request: &GenerateRequest, prompts: Prompts, hashes: Option<Vec<String>>) -> Self {
        let ids = prompts == Prompts::Ids;
        Self {
            t,
            add,
            prompt_tokens: request.prompt.len(),
            max_tokens: request.max_tokens,
            priority: request.priority,
            ids: ids.then(|| request.prompt.to_vec()),
            images: request.images.iter().filter(|_| ids).map(QueuedImage::new).collect(),
            hashes,
            choice_of: None,
            seed: None,
            parameters: ids.then(|| Parameters::from_request(request)),
        }
    }

    /// Another choice of the request `first`, whose line contains the prompt and the parameters.
    pub fn choice(t: f64, add: u64, request: &GenerateRequest, prompts: Prompts, first: u64) -> Self {
        let lengths = Self::new(t, add, request, Prompts::Lengths, None);
        let seed = (prompts == Prompts::Ids).then(|| request.sampling.seed());
        Self { choice_of: Some(first), seed, ..lengths }
    }

    /// The line, completed with the prompt and parameters of the `first` choice.
    #[must_use]
    pub fn complete(self, first: &Self) -> Self {
        let (seed, parameters) = (self.seed, first.parameters.clone());
        let parameters =
            parameters.map(|parameters| Parameters { seed: seed.unwrap_or(parameters.seed), ..parameters });
        let (ids, images, hashes) = (first.ids.clone(), first.images.clone(), first.hashes.clone());
        Self { ids, images, hashes, parameters, choice_of: None, seed: None, ..self }
    }

    /// The original request without its grammar, and with other images of the same shapes; `None` without ids.
    ///
    /// # Errors
    /// A parameter is out of range, or images do not fit the prompt: this program did not write the line.
    pub fn request(&self, vocab_size: usize) -> Result<Option<GenerateRequest>> {
        let (Some(ids), Some(parameters)) = (&self.ids, &self.parameters) else { return Ok(None) };
        let Parameters { temperature, top_k, top_p, min_p, seed, .. } = *parameters;
        let logits_processors = match &parameters.logits_processors {
            Some(processors) => LogitsProcessors::new(processors.clone(), vocab_size)?,
            None => None,
        };
        let images = self.images_of(ids)?;
        let stand_in = |ImageSpan { start, image }: &ImageSpan| {
            let image = image.stand_in().map(Arc::new);
            image.map(|image| ImageSpan { start: *start, image })
        };
        let images: Option<Arc<[ImageSpan]>> = images.iter().map(stand_in).collect();
        Ok(Some(GenerateRequest {
            images: images.unwrap_or_default(),
            sampling: SamplingParams::new(temperature, top_k, top_p, min_p, seed)?,
            logits_processors,
            stop_token_ids: parameters.stop_token_ids.clone(),
            ignore_eos: parameters.ignore_eos,
            priority: self.priority,
            cache_salt: parameters.cache_salt,
            ..GenerateRequest::greedy(ids.clone(), self.max_tokens)
        }))
    }
}

impl Added {
    /// The images at their places in the prompt, without pixels.
    ///
    /// # Errors
    /// They do not fit the prompt: this program did not write the line.
    pub fn images_of(&self, ids: &[u32]) -> Result<Arc<[ImageSpan]>> {
        let spans = QueuedImage::spans(&self.images, ids.len());
        spans.map_err(|reason| anyhow!("the images of request {} do not fit its prompt: {reason}", self.add))
    }
}

impl Parameters {
    fn from_request(request: &GenerateRequest) -> Self {
        let sampling = &request.sampling;
        Self {
            temperature: sampling.temperature(),
            top_k: sampling.top_k(),
            top_p: sampling.top_p(),
            min_p: sampling.min_p(),
            seed: sampling.seed(),
            stop_token_ids: request.stop_token_ids.clone(),
            ignore_eos: request.ignore_eos,
            cache_salt: request.cache_salt,
            logits_processors: request.logits_processors.as_ref().map(|it| it.params().clone()),
            grammar: request.grammar.as_ref().map(|grammar| grammar.source()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::keys;
    use pegainfer_core::images::Image;
    use std::collections::BTreeMap;

    #[test]
    fn a_request_comes_back_as_it_was() {
        let processors = LogitsProcessorParams {
            frequency_penalty: 0.1,
            logit_bias: BTreeMap::from([(3, -1.7)]),
            bad_words: vec![vec![1, 2]],
            ..LogitsProcessorParams::default()
        };
        let request = GenerateRequest {
            sampling: SamplingParams::new(0.7, 20, 0.95, 0.01, u64::MAX - 5).unwrap(),
            logits_processors: LogitsProcessors::new(processors, 100).unwrap(),
            stop_token_ids: vec![9],
            ignore_eos: true,
            priority: -2,
            cache_salt: u64::MAX,
            ..GenerateRequest::greedy([5, 6, 7], 12)
        };
        let line = RecordLine::Added(Box::new(Added::new(1.5, 3, &request, Prompts::Ids, None)));
        let text = serde_json::to_string(&line).unwrap();
        let read: RecordLine = text.parse().unwrap();
        assert_eq!(read, line, "{text}");
        let RecordLine::Added(added) = read else { panic!("{text}") };
        let again = added.request(100).unwrap().unwrap();
        assert_eq!(format!("{again:?}"), format!("{request:?}"));
        assert!(added.request(50).is_ok() && added.request(3).is_err(), "token 3 is beyond the vocabulary");
    }

    #[test]
    fn images_come_back_with_their_shapes_and_hashes_but_other_pixels() {
        let image = |colour| Arc::new(Image::new((2, 4), vec![colour; 8 * 768]).unwrap());
        let spans = |colour| [(1, image(1)), (3, image(colour))].map(|(start, image)| ImageSpan { start, image });
        let request = |colour| GenerateRequest {
            images: spans(colour).into(),
            ..GenerateRequest::greedy([5, 9, 9, 9, 9, 6], 12)
        };
        let added = |colour| Added::new(1.5, 3, &request(colour), Prompts::Ids, None);
        let text = serde_json::to_string(&added(2)).unwrap();
        let read: Added = serde_json::from_str(&text).unwrap();
        assert_eq!(read, added(2));
        assert_eq!(Added::choice(0.5, 4, &request(2), Prompts::Ids, 3).complete(&read).images, read.images);
        let again = read.request(100).unwrap().unwrap().images;
        assert_eq!(again.iter().map(ImageSpan::range).collect::<Vec<_>>(), [1..3, 3..5]);
        assert!(again[0].image != spans(2)[0].image && again[0].image != again[1].image);
        assert_eq!(again, added(2).request(100).unwrap().unwrap().images);
        // Prompts of a trace are equal up to the first image that differs.
        let keys = |colour| keys(&spans(colour), &request(colour).prompt);
        assert_eq!((keys(2).len(), keys(2)[..3].to_vec()), (6, keys(3)[..3].to_vec()));
        assert_ne!(keys(2)[3], keys(3)[3]);
        assert!(added(2).hashes.is_none() && Added::new(0.0, 1, &request(2), Prompts::Hashes, None).images.is_empty());
        for (change, words) in [("[5,", "[5,7,"), ("\"start\":3", "\"start\":2"), ("\"grid\":[2,4]", "\"grid\":[2,5]")]
        {
            let bad = text.replacen(change, words, 1).replace("[5,7,9,9,9,9,6]", "[5,9,9,9]");
            let read: Added = serde_json::from_str(&bad).unwrap();
            let error = read.request(100).unwrap_err().to_string();
            assert!(error.starts_with("the images of request 3 do not fit its prompt: "), "{error}");
        }
    }

    #[test]
    fn a_choice_has_the_prompt_of_the_first_one_and_its_own_seed() {
        let request = |seed| GenerateRequest {
            sampling: SamplingParams::new(0.7, 20, 0.95, 0.01, seed).unwrap(),
            stop_token_ids: vec![9],
            ..GenerateRequest::greedy([5; 1000], 12)
        };
        let first = Added::new(0.0, 3, &request(1), Prompts::Ids, None);
        let second = Added::choice(0.5, 4, &request(2), Prompts::Ids, 3);
        let text = serde_json::to_string(&second).unwrap();
        assert!(text.len() < 120, "{text}");
        let read: Added = serde_json::from_str(&text).unwrap();
        assert_eq!(read.choice_of, Some(3));
        assert_eq!(read.complete(&first), Added::new(0.5, 4, &request(2), Prompts::Ids, None));
        // The seed is recorded only together with ids.
        let hashed = serde_json::to_string(&Added::choice(0.5, 4, &request(2), Prompts::Hashes, 3)).unwrap();
        assert!(!hashed.contains("seed"), "{hashed}");
    }

    #[test]
    fn only_ids_are_what_a_client_sent() {
        let request = GenerateRequest::greedy([41, 42, 43], 12);
        for (prompts, hashes) in [(Prompts::Hashes, Some(Vec::new())), (Prompts::Lengths, None)] {
            let text = serde_json::to_string(&Added::new(0.0, 0, &request, prompts, hashes)).unwrap();
            assert!(!text.contains("42") && !text.contains("parameters"), "{text}");
            let added: Added = serde_json::from_str(&text).unwrap();
            assert!(added.request(100).unwrap().is_none() && added.prompt_tokens == 3);
        }
    }
}
