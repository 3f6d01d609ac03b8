//! The JSON of a rendered request: vLLM's request with token ids, which `/inference/v1/generate` takes.

use super::params::Params;
use super::schema::generation::{GenerationFields, StreamOptionsFields};
use super::schema::numbers::TokenId;
use super::schema::sampling::SamplingFields;
use super::schema::values::{Object, Text};
use super::structured::Structured;
use pegainfer_core::engine::GenerateRequest;
use pegainfer_core::images::{self, ImageSpan};
use pegainfer_text::GrammarSource;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// Maximum number of bytes of a token id.
pub const TOKEN_BYTES: usize = 8;
/// Maximum number of bytes of an image's hash and placeholder.
pub const IMAGE_BYTES: usize = 160;
/// Maximum number of bytes of an entry of `logit_bias`.
const BIAS_BYTES: usize = 32;
/// Maximum number of bytes for one byte of a string, which may be escaped.
const ESCAPED: usize = 6;
/// Maximum number of bytes of names, numbers and ids.
const FIXED_BYTES: usize = 2048;

/// A request with a tokenized prompt.
#[derive(Serialize, JsonSchema)]
pub struct RenderedRequest {
    /// `chatcmpl-…` or `cmpl-…`.
    request_id: String,
    /// Token ids of the prompt.
    token_ids: Vec<u32>,
    /// The images of the prompt, if there are any.
    features: Option<RenderedImages>,
    /// The sampling parameters that the request would run with.
    sampling_params: RenderedParams,
    /// Model name that the client used.
    model: String,
    /// True if the client wants a stream.
    stream: bool,
    /// Options of the stream, if the client gave any.
    stream_options: Option<RenderedStreamOptions>,
    /// The client's salt of cached prefixes.
    cache_salt: Option<String>,
    /// Lower numbers leave the queue first.
    priority: i64,
    /// Always null: KV is not transferred.
    kv_transfer_params: (),
}

/// The images of a prompt, in vLLM's shape.
#[derive(Serialize, JsonSchema)]
pub struct RenderedImages {
    /// Hashes of the scaled pixels: equal images have equal hashes.
    mm_hashes: OfImages<String>,
    /// The images' tokens in the prompt.
    mm_placeholders: OfImages<Placeholder>,
}

/// A list with an entry for each image.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OfImages{T}")]
struct OfImages<T> {
    /// The entries.
    image: Vec<T>,
}

/// Tokens of an image in a prompt.
#[derive(Serialize, JsonSchema)]
struct Placeholder {
    /// Index of the first one.
    offset: usize,
    /// Their number.
    length: usize,
}

impl RenderedImages {
    fn of(spans: &[ImageSpan]) -> Option<Self> {
        let hash = |span: &ImageSpan| images::hex(span.image.hash());
        let placeholder = |span: &ImageSpan| Placeholder { offset: span.start, length: span.image.tokens() };
        (!spans.is_empty()).then(|| Self {
            mm_hashes: OfImages { image: spans.iter().map(hash).collect() },
            mm_placeholders: OfImages { image: spans.iter().map(placeholder).collect() },
        })
    }
}

/// Options of a stream.
#[derive(Clone, Copy, Serialize, JsonSchema)]
pub struct RenderedStreamOptions {
    /// Send one more chunk at the end, with the token counts.
    include_usage: bool,
    /// Send the token counts so far in every chunk.
    continuous_usage_stats: bool,
}

/// Sampling parameters, with the checkpoint's defaults.
#[derive(Serialize, JsonSchema)]
pub struct RenderedParams {
    /// Number of choices.
    n: usize,
    /// Divisor of the logits; 0 is greedy.
    temperature: f32,
    /// Probability mass that is kept.
    top_p: f32,
    /// Number of most likely tokens that are kept; 0 keeps all.
    top_k: u32,
    /// Minimum probability of a kept token, relative to the most likely token.
    min_p: f32,
    /// The client's seed.
    seed: Option<i64>,
    /// Makes tokens that were generated less likely.
    presence_penalty: f64,
    /// Makes tokens less likely by how often they were generated.
    frequency_penalty: f64,
    /// Makes tokens of the prompt and the text less likely; 1 is none.
    repetition_penalty: f32,
    /// Map from token ids to values added to their logits.
    #[schemars(with = "Option<BTreeMap<String, f32>>")]
    logit_bias: Option<BTreeMap<u32, f32>>,
    /// The only tokens that may be drawn.
    allowed_token_ids: Option<Vec<u32>>,
    /// Strings that must not be generated.
    bad_words: Vec<String>,
    /// Maximum number of tokens to generate.
    max_tokens: usize,
    /// Minimum number of tokens to generate.
    min_tokens: usize,
    /// Strings that end the text.
    stop: Vec<String>,
    /// Token ids that end the text.
    stop_token_ids: Vec<u32>,
    /// Include the stop string in the text.
    include_stop_str_in_output: bool,
    /// Continue after the end-of-text token.
    ignore_eos: bool,
    /// False shows special tokens in the text.
    skip_special_tokens: bool,
    /// Number of most likely tokens to report at each position.
    logprobs: Option<usize>,
    /// Number of most likely tokens to report at each position of the prompt.
    prompt_logprobs: Option<usize>,
    /// Structure of the output, if it begins with the first token.
    structured_outputs: Option<RenderedStructure>,
}

/// Structure of the output.
#[derive(Serialize, JsonSchema)]
pub struct RenderedStructure {
    /// A Lark grammar.
    grammar: String,
}

/// The grammar of a structure whose source is Lark.
fn lark(structured: &Structured) -> &str {
    match &structured.source {
        GrammarSource::Lark(grammar) => grammar,
        _ => "",
    }
}

/// The fields of a request that its rendered form repeats.
pub struct Repeated {
    stream: bool,
    stream_options: Option<RenderedStreamOptions>,
    sampling: SamplingFields,
}

impl Repeated {
    /// Copies the fields of a request before it is rendered.
    pub fn new(generation: &GenerationFields, sampling: &SamplingFields) -> Self {
        let options = |Object(options): &Object<StreamOptionsFields>| RenderedStreamOptions {
            include_usage: options.include_usage.unwrap_or(false),
            continuous_usage_stats: options.continuous_usage_stats.unwrap_or(false),
        };
        Self {
            stream: generation.stream.unwrap_or(false),
            stream_options: generation.stream_options.as_ref().map(options),
            sampling: sampling.clone(),
        }
    }

    /// Maximum number of bytes of a rendered request besides its token ids.
    pub fn max_bytes(&self, params: &Params, structured: Option<&Structured>) -> usize {
        let SamplingFields { bad_words, allowed_token_ids, logit_bias, cache_salt, .. } = &self.sampling;
        let words: usize = bad_words.iter().flatten().map(|Text(word)| word.len()).sum();
        let stops: usize = params.stop.iter().map(String::len).sum();
        let grammar = structured.map_or(0, |structured| lark(structured).len());
        let strings = words + stops + grammar + cache_salt.as_ref().map_or(0, String::len) + params.model.len();
        let ids = allowed_token_ids.as_ref().map_or(0, Vec::len) + params.stop_token_ids.len();
        let biases = logit_bias.as_ref().map_or(0, |bias| bias.0.len());
        FIXED_BYTES + ESCAPED * strings + TOKEN_BYTES * ids + BIAS_BYTES * biases
    }

    /// The rendered form of the engine's request for a prompt, with a structure from the first token on.
    pub fn render(
        &self,
        kind: &str,
        params: &Params,
        request: &GenerateRequest,
        structured: Option<&Structured>,
    ) -> RenderedRequest {
        let fields = &self.sampling;
        let sampling = &request.sampling;
        let ids = |ids: &Vec<TokenId>| ids.iter().map(|TokenId(id)| *id).collect();
        let grammar = structured.map(|structured| RenderedStructure { grammar: lark(structured).to_owned() });
        let sampling_params = RenderedParams {
            n: params.n,
            temperature: sampling.temperature(),
            top_p: sampling.top_p(),
            top_k: sampling.top_k(),
            min_p: sampling.min_p(),
            seed: fields.seed,
            presence_penalty: fields.presence_penalty.unwrap_or(0.0),
            frequency_penalty: fields.frequency_penalty.unwrap_or(0.0),
            repetition_penalty: params.repetition_penalty,
            logit_bias: fields.logit_bias.as_ref().map(|bias| bias.0.clone()),
            allowed_token_ids: fields.allowed_token_ids.as_ref().map(ids),
            bad_words: fields.bad_words.iter().flatten().map(|Text(word)| word.clone()).collect(),
            max_tokens: request.max_tokens,
            min_tokens: params.min_tokens,
            stop: params.stop.clone(),
            stop_token_ids: request.stop_token_ids.clone(),
            include_stop_str_in_output: params.include_stop,
            ignore_eos: request.ignore_eos,
            skip_special_tokens: !params.show_special,
            logprobs: request.logprobs,
            prompt_logprobs: params.prompt_logprobs,
            structured_outputs: grammar,
        };
        RenderedRequest {
            request_id: format!("{kind}-{}", params.request_id),
            token_ids: request.prompt.to_vec(),
            features: RenderedImages::of(&request.images),
            sampling_params,
            model: params.model.clone(),
            stream: self.stream,
            stream_options: self.stream_options,
            cache_salt: fields.cache_salt.clone(),
            priority: fields.priority.map_or(0, |priority| priority.0),
            kv_transfer_params: (),
        }
    }
}
