//! Fields of a conversation in OpenAI's chat format: messages, tools and arguments of the chat template.

use super::forms::{Alternative, TextOr, TextOrList};
use super::numbers::Count;
use super::values::{Object, names};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::fmt;

/// Input of the chat template.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct ConversationFields {
    /// The conversation.
    #[schemars(length(min = 1))]
    pub messages: Option<Vec<Object<MessageFields>>>,
    /// Functions that the model may call.
    pub tools: Option<Vec<Object<ToolFields>>>,
    /// none, auto, required, or a function.
    pub tool_choice: Option<ToolChoiceField>,
    /// False allows one call only.
    pub parallel_tool_calls: Option<bool>,
    /// Arguments of the chat template, such as enable_thinking.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// How much to reason; the chat template defines what it does.
    pub reasoning_effort: Option<Effort>,
    /// End the prompt with the beginning of the assistant's turn.
    pub add_generation_prompt: Option<bool>,
    /// Continue the last message.
    pub continue_final_message: Option<bool>,
    /// Size of images after scaling, for models that read images.
    pub mm_processor_kwargs: Option<Object<ImagePixelsFields>>,
}

/// Size of images after scaling, instead of the model's. The server's limit holds as well.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct ImagePixelsFields {
    /// Minimum number of pixels.
    pub min_pixels: Option<Count<1>>,
    /// Maximum number of pixels, at least the 1,024 of one token.
    pub max_pixels: Option<Count<1>>,
}

/// One message.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct MessageFields {
    /// Author; latest_reminder is DeepSeek-V4's only.
    #[schemars(required, extend("enum" = ["user", "assistant", "system", "developer", "tool", "latest_reminder"]))]
    pub role: Option<String>,
    /// The text.
    pub content: Option<ContentField>,
    /// The reasoning of an earlier turn.
    pub reasoning: Option<String>,
    /// The older name of reasoning; it wins.
    pub reasoning_content: Option<String>,
    /// Calls that the assistant made.
    pub tool_calls: Option<Vec<Object<ToolCallFields>>>,
    /// The call that a message of role tool answers.
    pub tool_call_id: Option<String>,
    /// Name of the author, for templates that show it.
    pub name: Option<String>,
    /// DeepSeek-V4's task of a user message.
    pub task: Option<String>,
    /// Refusals are not part of prompts.
    #[schemars(with = "()")]
    pub refusal: Option<String>,
    /// Has no effect.
    pub annotations: Option<Value>,
    /// Audio is not part of prompts.
    #[schemars(with = "()")]
    pub audio: Option<Value>,
    /// The older form of tool_calls.
    #[schemars(with = "()")]
    pub function_call: Option<Value>,
}

/// A call that the assistant made.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct ToolCallFields {
    /// Id of the call.
    pub id: Option<String>,
    /// function.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// Index of the call, as streams have it; has no effect.
    pub index: Option<Value>,
    /// The function and its arguments.
    #[schemars(required)]
    pub function: Option<Object<CalledFunctionFields>>,
}

/// A called function.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct CalledFunctionFields {
    /// Name of the function.
    #[schemars(required)]
    pub name: Option<String>,
    /// The arguments: the text of a JSON object, or the object.
    pub arguments: Option<ArgumentsField>,
}

/// Arguments of a call: the text of a JSON object, maybe cut off, or the object.
pub type ArgumentsField = TextOr<Map<String, Value>>;

impl Alternative for Map<String, Value> {
    const FORMS: &'static str = "an object or the text of one";
    const IS_LIST: bool = false;
}

/// A function that the model may call.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct ToolFields {
    /// function.
    #[serde(rename = "type")]
    #[schemars(required, extend("enum" = ["function"]))]
    pub kind: Option<String>,
    /// The function.
    #[schemars(required)]
    pub function: Option<Object<FunctionFields>>,
}

/// A function.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct FunctionFields {
    /// Name: 1 to 128 letters, digits, '_', '-', '.', ':' or '/'.
    #[schemars(required, length(min = 1, max = 128), regex(pattern = "^[A-Za-z0-9_.:/-]+$"))]
    pub name: Option<String>,
    /// Description of the function, for the model.
    pub description: Option<String>,
    /// JSON schema of the arguments.
    pub parameters: Option<Parameters>,
    /// True if a forced call's arguments must satisfy the whole schema.
    pub strict: Option<bool>,
}

/// JSON schema of a function's arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameters(pub Map<String, Value>);

/// `content` of a message: a string, or a list of parts.
pub type ContentField = TextOrList<ContentPart>;

impl Alternative for Vec<ContentPart> {
    const FORMS: &'static str = "a string or a list of parts";
    const IS_LIST: bool = true;
}

/// One part of a content: a string, or an object with a type.
pub type ContentPart = TextOr<ContentPartFields>;

impl Alternative for ContentPartFields {
    const FORMS: &'static str = "an object with a type";
    const IS_LIST: bool = false;
}

/// A part of a content.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[schemars(example = json!({"type": "text", "text": "Hello!"}))]
pub struct ContentPartFields {
    /// text or image_url. In a tool's result, a note takes the place of parts that the model does not read.
    #[serde(rename = "type")]
    #[schemars(required, extend("enum" = ["text", "image_url"]))]
    pub kind: Option<String>,
    /// The text of a text.
    pub text: Option<String>,
    /// The image of an image_url: a data URL, or an object with one.
    pub image_url: Option<ImageUrlField>,
    /// Not implemented: images have no names.
    #[schemars(with = "()")]
    pub uuid: Option<Value>,
    /// The text of an earlier answer's part of the type refusal.
    pub refusal: Option<String>,
    /// Has no effect: prefixes are always cached.
    pub cache_control: Option<Value>,
}

/// `image_url`.
pub type ImageUrlField = TextOr<ImageUrlFields>;

/// An image.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
pub struct ImageUrlFields {
    /// A data URL in base64 of a PNG, JPEG, WebP or GIF file.
    #[schemars(required)]
    pub url: Option<String>,
    /// How many tokens the image may have: low at most 256, others as many as the server allows.
    #[schemars(extend("enum" = ["low", "high", "auto", "original"]))]
    pub detail: Option<String>,
}

impl Alternative for ImageUrlFields {
    const FORMS: &'static str = "a URL or an object with one";
    const IS_LIST: bool = false;
}

/// `tool_choice`.
pub type ToolChoiceField = TextOr<NamedChoiceFields, ToolMode>;

/// The forms of `tool_choice` in words, for errors.
pub const TOOL_CHOICES: &str = "none, auto, required or {\"type\": \"function\", \"function\": {\"name\": …}}";

impl Alternative for NamedChoiceFields {
    const FORMS: &'static str = TOOL_CHOICES;
    const IS_LIST: bool = false;
}

/// A function that has to be called, or the functions that may be called.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct NamedChoiceFields {
    /// function or allowed_tools.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// The function that has to be called.
    pub function: Option<Object<NameFields>>,
    /// The functions that may be called.
    pub allowed_tools: Option<Object<AllowedToolsFields>>,
}

/// The functions that may be called.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
pub struct AllowedToolsFields {
    /// auto or required.
    pub mode: Option<ToolMode>,
    /// The functions.
    pub tools: Option<Vec<Object<AllowedToolFields>>>,
}

/// A function that may be called.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
pub struct AllowedToolFields {
    /// function.
    #[serde(rename = "type")]
    #[schemars(required, extend("enum" = ["function"]))]
    pub kind: Option<String>,
    /// The function.
    #[schemars(required)]
    pub function: Option<Object<NameFields>>,
}

/// A function, by its name.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
pub struct NameFields {
    /// Name of the function.
    #[schemars(required)]
    pub name: Option<String>,
}

names! {
    /// Whether the model may or must call tools.
    ToolMode {
        /// No call.
        None = "none",
        /// The model decides.
        Auto = "auto",
        /// At least one call.
        Required = "required",
    }
}

names! {
    /// Values of `reasoning_effort`: OpenAI's, and DeepSeek's `max`.
    Effort {
        /// No reasoning.
        None = "none",
        /// The least.
        Minimal = "minimal",
        /// Little.
        Low = "low",
        /// The usual.
        Medium = "medium",
        /// Much.
        High = "high",
        /// More.
        Xhigh = "xhigh",
        /// The most.
        Max = "max",
    }
}

impl<'de> Deserialize<'de> for Parameters {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ParametersVisitor;

        impl<'de> Visitor<'de> for ParametersVisitor {
            type Value = Parameters;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON schema")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Parameters, A::Error> {
                Map::deserialize(MapAccessDeserializer::new(map)).map(Parameters)
            }
        }

        deserializer.deserialize_map(ParametersVisitor)
    }
}

impl JsonSchema for Parameters {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Parameters".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        Map::<String, Value>::json_schema(generator)
    }
}

impl JsonSchema for NamedChoiceFields {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "NamedChoice".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let named = |kind: &str, field: &str, schema: Schema| {
            let properties = serde_json::json!({"type": {"type": "string", "enum": [kind]}, field: schema});
            json_schema!({"type": "object", "required": ["type", field], "properties": properties})
        };
        let function = named("function", "function", generator.subschema_for::<NameFields>());
        let allowed = named("allowed_tools", "allowed_tools", generator.subschema_for::<AllowedToolsFields>());
        json_schema!({"anyOf": [function, allowed]})
    }
}
