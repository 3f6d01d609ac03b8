//! A generating call as the fields of a completion. Each field is honoured or refused by name.

use crate::api::conversation::FieldNames;
use crate::api::schema::completions::PromptInput;
use crate::api::schema::generation::{GenerationFields, MAX_LOGPROBS};
use crate::api::schema::numbers::{Int, LogitBias, MAX_BIASES, MAX_COUNT, TokenId};
use crate::api::schema::sampling::SamplingFields;
use crate::api::schema::structure::{SchemaOrText, StructureFields, StructuredOutputsFields};
use crate::api::schema::values::{Object, Text, Texts};
use crate::api::structured::Structured;
use crate::error::ApiError;
use crate::ids;
use serde_json::Value;
use vllm_proto::candidate_tokens::Select;
use vllm_proto::decoding_parameters::StructuredOutput;
use vllm_proto::generate_request::Prompt;
use vllm_proto::{
    CandidateTokens, DecodingParameters, EngineReasoningGate, GenerateRequest, KvCacheParameters, RandomSampling,
    ResponseOptions, StoppingCriteria, TokenIds,
};

/// Names of the fields, for errors.
pub const NAMES: FieldNames =
    FieldNames { stop: "stopping.stop_strings", max_tokens: "stopping.max_new_tokens", ..FieldNames::CHAT };
/// Maximum number of sequences.
const MAX_SEQUENCES: u32 = 128;
/// Maximum number of sequences in `bad_words_token_ids`, and of tokens in each.
const MAX_BAD_WORDS: usize = 128;

/// A call as the fields of a completion.
#[derive(Debug)]
pub struct CompletionFields {
    /// The prompt.
    pub prompt: PromptInput,
    /// How much to generate, and what to report.
    pub generation: GenerationFields,
    /// How to draw tokens.
    pub sampling: SamplingFields,
    /// Structure of the output.
    pub structured: Option<Structured>,
    /// Number of most likely tokens to report at each position.
    pub logprobs: Option<usize>,
    /// True if the call names a temperature.
    pub has_temperature: bool,
    /// The served model.
    pub model: Option<String>,
    /// An adapter of the model.
    pub adapter: Option<String>,
    /// What the responses hold.
    pub report: Report,
    /// Fields that have no effect.
    pub ignored: Vec<&'static str>,
}

/// What the responses hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// The prompt.
    pub prompt: ReportTokens,
    /// The output.
    pub output: ReportTokens,
    /// The text of the output.
    pub text: bool,
}

/// What the responses hold of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReportTokens {
    /// Their ids.
    pub ids: bool,
    /// Their log-probabilities and ranks.
    pub logprobs: bool,
    /// Other likely tokens.
    pub candidates: bool,
}

impl CompletionFields {
    /// The fields of a call.
    pub fn new(call: GenerateRequest) -> Result<Self, ApiError> {
        refuse_unimplemented(&call)?;
        let mut fields = Self {
            prompt: prompt(call.prompt)?,
            generation: GenerationFields::default(),
            sampling: SamplingFields::default(),
            structured: None,
            logprobs: None,
            has_temperature: call.temperature.is_some(),
            model: given(call.model),
            adapter: given(call.lora_name),
            report: Report::new(call.response.as_ref()),
            ignored: call.kv_hints.iter().map(|_| "kv_hints").collect(),
        };
        fields.generation.truncate_prompt_tokens = count("truncate_prompt_tokens", call.truncate_prompt_tokens)?;
        fields.sampling.request_id = given(call.request_id);
        fields.sampling.temperature = call.temperature.map(f64::from);
        fields.sampling.priority = Some(Int(call.priority.into()));
        fields.response(call.response.unwrap_or_default())?;
        fields.random_sampling(call.sampling.unwrap_or_default())?;
        fields.stopping(call.stopping.unwrap_or_default())?;
        fields.decoding(call.decoding.unwrap_or_default())?;
        fields.kv(call.kv.unwrap_or_default())?;
        match call.engine_reasoning_gate {
            Some(EngineReasoningGate { reasoning_ended: None | Some(false), .. }) if fields.structured.is_some() => {
                let message = "the structure holds from the first token on: reasoning_ended must be true";
                Err(unsupported("engine_reasoning_gate", message))
            }
            _ => Ok(fields),
        }
    }

    fn response(&mut self, options: ResponseOptions) -> Result<(), ApiError> {
        let top = |selected, name, logprobs: bool| {
            let candidates = candidates(selected, name)?;
            Ok::<_, ApiError>(candidates.or(logprobs.then_some(0)))
        };
        self.logprobs = top(options.output_candidates, "response.output_candidates", options.output_logprobs)?;
        let prompt = top(options.prompt_candidates, "response.prompt_candidates", options.prompt_logprobs)?;
        self.generation.prompt_logprobs = prompt.map(|n| Int(n as i64));
        self.generation.return_token_ids = Some(options.prompt_token_ids || options.output_token_ids);
        self.sampling.skip_special_tokens = options.skip_special_tokens;
        Ok(())
    }

    fn random_sampling(&mut self, sampling: RandomSampling) -> Result<(), ApiError> {
        let n = sampling.num_sequences;
        if n > MAX_SEQUENCES {
            let message = format!("sampling.num_sequences must be at most {MAX_SEQUENCES}, got {n}");
            return Err(ApiError::invalid("sampling.num_sequences", message));
        }
        self.generation.n = Some(Int(n.max(1).into()));
        self.sampling.top_k = sampling.top_k.map(|k| whole("sampling.top_k", k).map(Int)).transpose()?;
        self.sampling.top_p = sampling.top_p.map(f64::from);
        self.sampling.min_p = sampling.min_p.map(f64::from);
        self.sampling.seed = sampling.seed;
        Ok(())
    }

    fn stopping(&mut self, stopping: StoppingCriteria) -> Result<(), ApiError> {
        if stopping.thinking_token_budget.is_some_and(|budget| budget != -1) {
            let message = "a prompt does not say where reasoning begins: only -1 is accepted";
            return Err(unsupported("stopping.thinking_token_budget", message));
        }
        self.generation.max_tokens = count("stopping.max_new_tokens", stopping.max_new_tokens)?;
        self.generation.stop = Some(Texts(stopping.stop_strings));
        self.generation.include_stop_str_in_output = Some(stopping.include_stop_strings);
        self.sampling.min_tokens = Some(Int(whole("stopping.min_new_tokens", stopping.min_new_tokens)?));
        self.sampling.stop_token_ids = Some(stopping.stop_token_ids.into_iter().map(TokenId).collect());
        self.sampling.ignore_eos = Some(stopping.ignore_eos);
        Ok(())
    }

    fn decoding(&mut self, decoding: DecodingParameters) -> Result<(), ApiError> {
        // 0 is no value: the checkpoint's own penalty, which usually is none.
        let penalty = |value: f32| (value != 0.0).then_some(value.into());
        self.sampling.presence_penalty = penalty(decoding.presence_penalty);
        self.sampling.frequency_penalty = penalty(decoding.frequency_penalty);
        self.sampling.repetition_penalty = penalty(decoding.repetition_penalty);
        if decoding.logit_bias.len() > MAX_BIASES {
            let message = format!("decoding.logit_bias may hold at most {MAX_BIASES} tokens");
            return Err(ApiError::invalid("decoding.logit_bias", message));
        }
        self.sampling.logit_bias = Some(LogitBias(decoding.logit_bias.into_iter().collect()));
        let allowed = decoding.allowed_token_ids;
        self.sampling.allowed_token_ids = (!allowed.is_empty()).then(|| allowed.into_iter().map(TokenId).collect());
        let bad_words: Vec<Vec<u32>> = decoding.bad_words_token_ids.into_iter().map(|TokenIds { ids }| ids).collect();
        if bad_words.len() > MAX_BAD_WORDS || bad_words.iter().any(|ids| ids.len() > MAX_BAD_WORDS) {
            let message = format!(
                "decoding.bad_words_token_ids may hold at most {MAX_BAD_WORDS} sequences of at most {MAX_BAD_WORDS} tokens"
            );
            return Err(ApiError::invalid("decoding.bad_words_token_ids", message));
        }
        self.sampling.bad_words_token_ids = bad_words;
        let structured_outputs = decoding.structured_output.map(structured).transpose()?.map(Object);
        self.structured = Structured::read(StructureFields { structured_outputs, ..StructureFields::default() })?;
        Ok(())
    }

    fn kv(&mut self, kv: KvCacheParameters) -> Result<(), ApiError> {
        for (name, params) in
            [("kv.kv_transfer_params", kv.kv_transfer_params), ("kv.ec_transfer_params", kv.ec_transfer_params)]
        {
            if params.is_some_and(|params| !params.fields.is_empty()) {
                return Err(unsupported(name, "this server transfers no cache from or to others"));
            }
        }
        self.sampling.cache_salt = given(kv.cache_salt);
        if kv.bypass_prefix_cache {
            // Nobody else has this salt.
            self.sampling.cache_salt = Some(format!("{:016x}{:016x}", ids::random_u64()?, ids::random_u64()?));
        }
        Ok(())
    }
}

impl Report {
    fn new(options: Option<&ResponseOptions>) -> Self {
        let options = options.cloned().unwrap_or_default();
        let tokens = |ids, logprobs, candidates: Option<CandidateTokens>| {
            let candidates = candidates.is_some_and(|it| matches!(it.select, Some(Select::TopN(1..))));
            ReportTokens { ids, logprobs, candidates }
        };
        Self {
            prompt: tokens(options.prompt_token_ids, options.prompt_logprobs, options.prompt_candidates),
            output: tokens(options.output_token_ids, options.output_logprobs, options.output_candidates),
            text: options.output_text.unwrap_or(true),
        }
    }
}

/// Refuses what this server does not implement.
fn refuse_unimplemented(call: &GenerateRequest) -> Result<(), ApiError> {
    if !call.media.is_empty() {
        return Err(unsupported("media", "no served model takes images, video or audio"));
    }
    if call.watermarking == Some(true) {
        return Err(unsupported("watermarking", "texts are not watermarked: leave it out, or send false"));
    }
    // A session only helps routers: prefixes are found by their tokens.
    Ok(())
}

fn prompt(prompt: Option<Prompt>) -> Result<PromptInput, ApiError> {
    match prompt {
        Some(Prompt::Text(text)) => Ok(PromptInput::Texts(vec![text])),
        Some(Prompt::TokenIds(TokenIds { ids })) => Ok(PromptInput::Ids(vec![ids])),
        None => Err(ApiError::invalid("prompt", "the prompt is missing: send text or token_ids")),
    }
}

/// The structured output as vLLM's JSON field.
fn structured(output: StructuredOutput) -> Result<StructuredOutputsFields, ApiError> {
    let mut fields = StructuredOutputsFields::default();
    match output {
        StructuredOutput::Json(schema) => {
            let invalid = |e| ApiError::invalid("decoding.json", format!("decoding.json is not valid JSON: {e}"));
            fields.json = Some(SchemaOrText(serde_json::from_str(&schema).map_err(invalid)?));
        }
        StructuredOutput::Regex(regex) => fields.regex = Some(regex),
        StructuredOutput::Choice(choices) => fields.choice = Some(choices.choices.into_iter().map(Text).collect()),
        StructuredOutput::Grammar(grammar) => fields.grammar = Some(grammar),
        StructuredOutput::JsonObject(any) => fields.json_object = Some(any),
        StructuredOutput::StructuralTag(tag) => fields.structural_tag = Some(Value::String(tag)),
    }
    Ok(fields)
}

/// Number of most likely tokens to report at each position; `None` if the call asks for none.
fn candidates(selected: Option<CandidateTokens>, name: &'static str) -> Result<Option<usize>, ApiError> {
    let max = MAX_LOGPROBS as u32;
    match selected.and_then(|it| it.select) {
        Some(Select::TopN(n)) if n > max => {
            Err(ApiError::invalid(name, format!("{name}.top_n must be at most {max}, got {n}")))
        }
        Some(Select::TopN(n)) => Ok((n > 0).then_some(n as usize)),
        Some(Select::TokenIds(TokenIds { ids })) if !ids.is_empty() => {
            Err(unsupported(name, "only top_n is accepted, not token_ids"))
        }
        Some(Select::All(true)) => Err(unsupported(name, "only top_n is accepted, not all")),
        _ => Ok(None),
    }
}

/// A text that is not empty.
fn given(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

/// A number in the range that completions take.
fn whole(name: &'static str, n: u32) -> Result<i64, ApiError> {
    if i64::from(n) <= MAX_COUNT {
        return Ok(n.into());
    }
    Err(ApiError::invalid(name, format!("{name} must be at most {MAX_COUNT}, got {n}")))
}

/// A number of which 0 is no value.
fn count<const MIN: i64>(name: &'static str, n: u32) -> Result<Option<Int<MIN, MAX_COUNT>>, ApiError> {
    Ok(Some(whole(name, n)?).filter(|n| *n > 0).map(Int))
}

fn unsupported(name: &'static str, why: &str) -> ApiError {
    ApiError::invalid(name, format!("{name} is not implemented: {why}")).with_code("unsupported_parameter")
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;
    use vllm_proto::decoding_parameters::StringChoices;
    use vllm_proto::{KvHintsEnvelope, MediaItem};

    fn call() -> GenerateRequest {
        GenerateRequest { prompt: Some(Prompt::Text("x".into())), ..GenerateRequest::default() }
    }

    /// Parameters with the struct `{"x": true}` in a field.
    fn transfer(field: u8) -> GenerateRequest {
        let bytes = [field << 3 | 2, 9, 0x0A, 7, 0x0A, 1, b'x', 0x12, 2, 0x20, 1];
        GenerateRequest { kv: Some(KvCacheParameters::decode(&bytes[..]).unwrap()), ..call() }
    }

    #[test]
    fn an_empty_call_has_the_defaults_of_a_completion() {
        let fields = CompletionFields::new(call()).unwrap();
        assert_eq!(fields.prompt, PromptInput::Texts(vec!["x".into()]));
        assert_eq!((fields.generation.max_tokens, fields.generation.n, fields.logprobs), (None, Some(Int(1)), None));
        assert_eq!((fields.sampling.temperature, fields.sampling.top_k), (None, None));
        assert!(fields.structured.is_none() && fields.report.text && fields.ignored.is_empty());
    }

    #[test]
    fn what_is_not_implemented_is_refused_by_name() {
        let all = Some(CandidateTokens { select: Some(Select::All(true)) });
        let ids = Some(CandidateTokens { select: Some(Select::TokenIds(TokenIds { ids: vec![1] })) });
        let response = |output_candidates, prompt_candidates| {
            Some(ResponseOptions { output_candidates, prompt_candidates, ..ResponseOptions::default() })
        };
        let decoding = |output| Some(DecodingParameters { structured_output: Some(output), ..Default::default() });
        let tag = StructuredOutput::StructuralTag("{}".into());
        let gate = Some(EngineReasoningGate::default());
        let sampling = |sampling| GenerateRequest { sampling: Some(sampling), ..call() };
        for (name, call) in [
            ("prompt", GenerateRequest::default()),
            ("media", GenerateRequest { media: vec![MediaItem::default()], ..call() }),
            ("watermarking", GenerateRequest { watermarking: Some(true), ..call() }),
            ("truncate_prompt_tokens", GenerateRequest { truncate_prompt_tokens: u32::MAX, ..call() }),
            ("response.output_candidates", GenerateRequest { response: response(all, None), ..call() }),
            ("response.prompt_candidates", GenerateRequest { response: response(None, ids), ..call() }),
            ("structured_outputs", GenerateRequest { decoding: decoding(tag), ..call() }),
            ("decoding.json", GenerateRequest { decoding: decoding(StructuredOutput::Json("{".into())), ..call() }),
            (
                "engine_reasoning_gate",
                GenerateRequest {
                    decoding: decoding(StructuredOutput::Regex("a".into())),
                    engine_reasoning_gate: gate,
                    ..call()
                },
            ),
            ("sampling.num_sequences", sampling(RandomSampling { num_sequences: 129, ..Default::default() })),
            ("sampling.top_k", sampling(RandomSampling { top_k: Some(u32::MAX), ..Default::default() })),
            ("kv.kv_transfer_params", transfer(3)),
            ("kv.ec_transfer_params", transfer(4)),
            (
                "stopping.thinking_token_budget",
                GenerateRequest {
                    stopping: Some(StoppingCriteria { thinking_token_budget: Some(0), ..Default::default() }),
                    ..call()
                },
            ),
        ] {
            let body = CompletionFields::new(call).unwrap_err().body();
            assert!(body.contains(&format!("\"param\":\"{name}\"")), "{name}: {body}");
        }
    }

    #[test]
    fn values_that_ask_for_nothing_are_accepted() {
        let nothing = GenerateRequest {
            session_id: Some("s".into()),
            watermarking: Some(false),
            kv_hints: Some(KvHintsEnvelope::default()),
            engine_reasoning_gate: Some(EngineReasoningGate::default()),
            stopping: Some(StoppingCriteria { thinking_token_budget: Some(-1), ..Default::default() }),
            decoding: Some(DecodingParameters {
                structured_output: Some(StructuredOutput::JsonObject(false)),
                ..Default::default()
            }),
            kv: Some(KvCacheParameters { kv_transfer_params: Some(Default::default()), ..Default::default() }),
            response: Some(ResponseOptions {
                output_candidates: Some(CandidateTokens { select: Some(Select::TopN(0)) }),
                ..Default::default()
            }),
            ..call()
        };
        let fields = CompletionFields::new(nothing).unwrap();
        assert!(fields.structured.is_none() && fields.logprobs.is_none());
        assert_eq!(fields.ignored, ["kv_hints"]);
    }

    #[test]
    fn structures_and_candidates_become_fields_of_a_completion() {
        let choices = StringChoices { choices: vec!["a".into(), "b".into()] };
        let structured_output = Some(StructuredOutput::Choice(choices));
        let call = GenerateRequest {
            decoding: Some(DecodingParameters { structured_output, repetition_penalty: 1.5, ..Default::default() }),
            kv: Some(KvCacheParameters { bypass_prefix_cache: true, ..Default::default() }),
            response: Some(ResponseOptions {
                output_logprobs: true,
                prompt_candidates: Some(CandidateTokens { select: Some(Select::TopN(3)) }),
                output_text: Some(false),
                ..Default::default()
            }),
            ..call()
        };
        let [one, other] = [0; 2].map(|_| CompletionFields::new(call.clone()).unwrap());
        assert!(one.structured.is_some());
        assert_eq!((one.logprobs, one.generation.prompt_logprobs), (Some(0), Some(Int(3))));
        assert_eq!(one.sampling.repetition_penalty, Some(1.5));
        assert_ne!(one.sampling.cache_salt, other.sampling.cache_salt, "a salt of its own");
        let prompt = ReportTokens { ids: false, logprobs: false, candidates: true };
        let output = ReportTokens { ids: false, logprobs: true, candidates: false };
        assert_eq!(one.report, Report { prompt, output, text: false });
    }
}
