//! Request fields for the OpenAPI document: name, JSON types, meaning.

/// One field; types are separated by `|`.
pub type Field = (&'static str, &'static str, &'static str);

/// Fields that completions and chats share.
pub const GENERATION: &[Field] = &[
    ("model", "string", "A served name; the first one by default."),
    ("stream", "boolean", "Send events as tokens are generated."),
    ("stream_options", "object", "include_usage, continuous_usage_stats."),
    ("max_tokens", "integer", "Maximum number of tokens to generate."),
    ("max_completion_tokens", "integer", "The newer name of max_tokens; it wins."),
    ("min_tokens", "integer", "Minimum number of tokens to generate."),
    ("n", "integer", "Choices for each prompt, 1 to 128."),
    ("best_of", "integer", "Must equal n."),
    ("temperature", "number", "0 is greedy."),
    ("top_p", "number", "Probability mass that is kept."),
    ("top_k", "integer", "Tokens that are kept; 0 or -1 keeps all."),
    ("min_p", "number", "Least probability, relative to the most likely token."),
    ("seed", "integer", "The same seed draws the same tokens."),
    ("presence_penalty", "number", "-2 to 2."),
    ("frequency_penalty", "number", "-2 to 2."),
    ("repetition_penalty", "number", "0.01 to 100; 1 is none."),
    ("logit_bias", "object", "Token ids to what is added to their logits, -100 to 100."),
    ("allowed_token_ids", "array", "The only tokens that may be drawn."),
    ("bad_words", "array", "Strings that must not be generated."),
    ("stop", "string|array", "Strings that end the text, at most 16."),
    ("stop_token_ids", "array", "Token ids that end the text."),
    ("include_stop_str_in_output", "boolean", "Include the stop string in the text."),
    ("ignore_eos", "boolean", "Go on past the end of the text."),
    ("skip_special_tokens", "boolean", "False shows special tokens in the text."),
    ("add_special_tokens", "boolean", "Let the tokenizer add its special tokens, such as BOS."),
    ("truncate_prompt_tokens", "integer", "Truncate the prompt to this many tokens; -1: to what fits the context."),
    ("truncation_side", "string", "Side that is truncated: left or right."),
    ("prompt_logprobs", "integer", "Most likely tokens to report at each position of the prompt, 0 to 20."),
    ("return_token_ids", "boolean", "Send token ids with the text."),
    ("return_tokens_as_token_ids", "boolean", "Name tokens token_id:N in log-probabilities."),
    ("response_format", "object", "text, json_object or json_schema."),
    ("structured_outputs", "object", "One of json, json_object, regex, choice and grammar."),
    ("priority", "integer", "Lower numbers leave the queue first."),
    ("cache_salt", "string", "Share cached prefixes only with requests of the same salt."),
    ("request_id", "string", "Becomes part of the response's id."),
    ("include_metrics", "boolean", "Report the time of each stage, with the token counts."),
];

/// Fields of completions only.
pub const COMPLETIONS: &[Field] = &[
    ("prompt", "string|array", "A text, token ids, or a list of either."),
    ("logprobs", "integer", "Most likely tokens to report at each position, 0 to 20."),
    ("echo", "boolean", "Begin the text with the prompt."),
];

/// Fields of chats only.
pub const CHAT: &[Field] = &[
    ("messages", "array", "The conversation."),
    ("logprobs", "boolean", "Report log-probabilities."),
    ("top_logprobs", "integer", "Most likely tokens to report at each position, 0 to 20."),
    ("tools", "array", "Functions that the model may call."),
    ("tool_choice", "string|object", "none, auto, required, or a function."),
    ("parallel_tool_calls", "boolean", "False allows one call only."),
    ("chat_template_kwargs", "object", "Arguments of the chat template, such as enable_thinking."),
    ("reasoning_effort", "string", "none, minimal, low, medium, high, xhigh or max."),
    ("thinking_token_budget", "integer", "Maximum number of reasoning tokens."),
    ("include_reasoning", "boolean", "False leaves the reasoning out."),
    ("add_generation_prompt", "boolean", "End the prompt with the beginning of the assistant's turn."),
    ("continue_final_message", "boolean", "Continue the last message."),
];

/// Fields of `/v1/responses`.
pub const RESPONSES: &[Field] = &[
    ("model", "string", "A served name; the first one by default."),
    ("input", "string|array", "A text, or items."),
    ("instructions", "string", "The system's message."),
    ("max_output_tokens", "integer", "Maximum number of tokens to generate."),
    ("temperature", "number", "0 is greedy."),
    ("top_p", "number", "Probability mass that is kept."),
    ("stream", "boolean", "Send events."),
    ("tools", "array", "Functions that the model may call."),
    ("tool_choice", "string|object", "none, auto, required, or a function."),
    ("parallel_tool_calls", "boolean", "False allows one call only."),
    ("text", "object", "format: text, json_object or json_schema."),
    ("reasoning", "object", "effort, as reasoning_effort of chats."),
    ("metadata", "object", "Returned in the response."),
    ("store", "boolean", "Only false: responses are not kept."),
];

/// Fields of `/v1/messages`.
pub const MESSAGES: &[Field] = &[
    ("model", "string", "A served name; the first one by default."),
    ("messages", "array", "The conversation."),
    ("system", "string|array", "The system's message."),
    ("max_tokens", "integer", "Maximum number of tokens to generate."),
    ("temperature", "number", "0 is greedy."),
    ("top_p", "number", "Probability mass that is kept."),
    ("top_k", "integer", "Tokens that are kept."),
    ("stop_sequences", "array", "Strings that end the text."),
    ("stream", "boolean", "Send events."),
    ("tools", "array", "Functions that the model may call."),
    ("tool_choice", "object", "auto, any, none, or a tool."),
    ("thinking", "object", "adaptive, enabled (budget_tokens) or disabled."),
    ("output_config", "object", "format: json_schema; effort."),
    ("metadata", "object", "Has no effect."),
];

/// Fields of `/tokenize`.
pub const TOKENIZE: &[Field] = &[
    ("model", "string", "A served name."),
    ("prompt", "string", "The text."),
    ("messages", "array", "A conversation, instead."),
    ("add_special_tokens", "boolean", "Let the tokenizer add its special tokens, such as BOS."),
    ("return_token_strs", "boolean", "Send the tokens as strings, too."),
];
