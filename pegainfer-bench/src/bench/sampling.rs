//! Sampling profiles of `bench throughput --sampling`: request fields of typical clients.

use clap::ValueEnum;
use serde_json::{Map, Value, json};

/// Fields of a request.
pub type Fields = Map<String, Value>;

/// One request in this many is unusual in a mixed profile.
const MIX: usize = 8;

/// Sampling of a run's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sampling {
    /// Temperature 0
    Greedy,
    /// Temperature 0.7, top-p 0.8, top-k 20: the advice for Qwen3
    Sampled,
    /// The same with a presence penalty of 1.5
    Penalty,
    /// The same with log-probabilities
    Logprobs,
    /// The same under a JSON schema
    Schema,
    /// Seven sampled requests and one with a penalty
    OnePenalty,
    /// Seven sampled requests and one under a JSON schema
    OneSchema,
}

impl Sampling {
    /// The profiles of the groups that are reported separately.
    pub fn groups(self) -> Vec<Self> {
        match self {
            Self::OnePenalty => vec![Self::Sampled, Self::Penalty],
            Self::OneSchema => vec![Self::Sampled, Self::Schema],
            uniform => vec![uniform],
        }
    }

    /// Minimum number of requests in a run, so that each group has some.
    pub fn min_requests(self) -> usize {
        if self.groups().len() > 1 { MIX } else { 1 }
    }

    /// The group of a request in a run.
    pub fn group(self, request: usize) -> usize {
        if self.groups().len() > 1 { usize::from(request % MIX == MIX - 1) } else { 0 }
    }

    /// The fields of a request for `output_len` tokens.
    pub fn fields(self, request: usize, output_len: usize) -> Fields {
        let fields = match self.groups()[self.group(request)] {
            Self::Sampled => json!({}),
            Self::Penalty => json!({"presence_penalty": 1.5}),
            Self::Logprobs => json!({"logprobs": 1}),
            Self::Schema => json!({"ignore_eos": false, "response_format": schema(output_len)}),
            Self::Greedy | Self::OnePenalty | Self::OneSchema => return Fields::new(),
        };
        let Value::Object(fields) = fields else { return Fields::new() };
        let sampled = [("temperature", json!(0.7)), ("top_p", json!(0.8)), ("top_k", json!(20))];
        fields.into_iter().chain(sampled.map(|(name, value)| (name.to_owned(), value))).collect()
    }

    /// Name of a group in the report.
    pub fn label(self, group: usize) -> String {
        let name = |profile: Self| profile.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned());
        match &self.groups()[..] {
            [_, _] if group == 0 => {
                format!("{} of {MIX} {}, 1 {}", MIX - 1, name(self.groups()[0]), name(self.groups()[1]))
            }
            [_, one] => format!("the {}", name(*one)),
            _ => name(self),
        }
    }
}

/// A schema that only texts of more than `output_len` tokens match.
fn schema(output_len: usize) -> Value {
    let digit = json!({"type": "integer", "minimum": 0, "maximum": 9});
    let digits = json!({"type": "array", "items": digit, "minItems": 2 * output_len, "maxItems": 2 * output_len});
    let object = json!({
        "type": "object", "properties": {"t": digits}, "required": ["t"], "additionalProperties": false,
    });
    json!({"type": "json_schema", "json_schema": {"name": "digits", "schema": object}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_request_of_eight_is_unusual_in_a_mix() {
        let unusual = (0..16).filter(|&i| Sampling::OnePenalty.fields(i, 4).contains_key("presence_penalty"));
        assert_eq!(unusual.collect::<Vec<_>>(), [7, 15]);
        assert_eq!([Sampling::OnePenalty, Sampling::Schema].map(Sampling::min_requests), [8, 1]);
        assert!((0..16).all(|i| Sampling::OneSchema.fields(i, 4)["top_k"] == 20));
        assert_eq!(Sampling::OneSchema.label(0), "7 of 8 sampled, 1 schema");
        assert_eq!(Sampling::OneSchema.label(1), "the schema");
        assert_eq!((Sampling::Greedy.fields(0, 4).len(), Sampling::Penalty.label(0)), (0, "penalty".into()));
    }
}
