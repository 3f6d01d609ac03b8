//! preprocessor_config.json, or the same in processor_config.json.

use crate::error::ConfigError;
use crate::size::TOKEN_AREA;
use serde_json::{Map, Value};

const PREPROCESSOR: &str = "preprocessor_config.json";
const PROCESSOR: &str = "processor_config.json";

/// Areas of Qwen3.5's processors in pixels, for models without either file.
pub(crate) const DEFAULT_AREAS: (u64, u64) = (65_536, 16_777_216);

/// A key that has one supported value.
struct Fixed {
    key: &'static str,
    is_supported: fn(&Value) -> bool,
    expected: &'static str,
}

/// Keys with a single supported value; they may be absent.
const FIXED: [Fixed; 11] = [
    Fixed { key: "image_processor_type", is_supported: is_known_type, expected: "Qwen2VLImageProcessor" },
    Fixed { key: "patch_size", is_supported: |value| is_number(value, 16.0), expected: "16" },
    Fixed { key: "merge_size", is_supported: |value| is_number(value, 2.0), expected: "2" },
    Fixed { key: "temporal_patch_size", is_supported: |value| is_number(value, 2.0), expected: "2" },
    Fixed { key: "image_mean", is_supported: is_half, expected: "[0.5, 0.5, 0.5]" },
    Fixed { key: "image_std", is_supported: is_half, expected: "[0.5, 0.5, 0.5]" },
    Fixed { key: "resample", is_supported: |value| is_number(value, 3.0), expected: "3 (bicubic)" },
    Fixed { key: "rescale_factor", is_supported: |value| is_number(value, 1.0 / 255.0), expected: "1/255" },
    Fixed { key: "do_resize", is_supported: is_true, expected: "true" },
    Fixed { key: "do_rescale", is_supported: is_true, expected: "true" },
    Fixed { key: "do_normalize", is_supported: is_true, expected: "true" },
];

fn is_known_type(value: &Value) -> bool {
    matches!(value.as_str(), Some("Qwen2VLImageProcessor" | "Qwen2VLImageProcessorFast" | "Qwen2VLImageProcessorPil"))
}

fn is_number(value: &Value, expected: f64) -> bool {
    value.as_f64().is_some_and(|number| (number - expected).abs() < 1e-9)
}

fn is_half(value: &Value) -> bool {
    value.as_array().is_some_and(|values| values.len() == 3 && values.iter().all(|value| is_number(value, 0.5)))
}

fn is_true(value: &Value) -> bool {
    value.as_bool() == Some(true)
}

/// Minimum and maximum area of an image in pixels, from the texts of the two files.
///
/// `image_processor` of processor_config.json comes first, as in transformers.
pub(crate) fn areas(preprocessor: Option<&str>, processor: Option<&str>) -> Result<(u64, u64), ConfigError> {
    let nested = match processor.map(|text| object(PROCESSOR, text)).transpose()? {
        Some(mut config) => config.remove("image_processor").filter(|value| !value.is_null()),
        None => None,
    };
    match (nested, preprocessor) {
        (Some(Value::Object(config)), _) => check(PROCESSOR, &config),
        (Some(_), _) => {
            Err(ConfigError::Json { file: PROCESSOR, message: "image_processor is not an object".to_owned() })
        }
        (None, Some(text)) => check(PREPROCESSOR, &object(PREPROCESSOR, text)?),
        (None, None) => Ok(DEFAULT_AREAS),
    }
}

fn object(file: &'static str, text: &str) -> Result<Map<String, Value>, ConfigError> {
    serde_json::from_str(text).map_err(|error| ConfigError::Json { file, message: error.to_string() })
}

fn check(file: &'static str, config: &Map<String, Value>) -> Result<(u64, u64), ConfigError> {
    let given = |key: &str| config.get(key).filter(|value| !value.is_null());
    for Fixed { key, is_supported, expected } in FIXED {
        if let Some(value) = given(key).filter(|value| !is_supported(value)) {
            return Err(ConfigError::Unsupported { file, key, value: value.to_string(), expected });
        }
    }
    let size = given("size").unwrap_or(&Value::Null);
    // Older keys come first. Despite their names, the edges are areas.
    let area = |older: &'static str, edge: &'static str, default: u64| {
        let keys = [(older, given(older)), (older, size.get(older)), (edge, size.get(edge))];
        match keys.into_iter().find_map(|(key, value)| Some((key, value.filter(|value| !value.is_null())?))) {
            None => Ok(default),
            Some((key, value)) => value.as_u64().filter(|area| (1..=1 << 40).contains(area)).ok_or_else(|| {
                ConfigError::Unsupported { file, key, value: value.to_string(), expected: "an area in pixels" }
            }),
        }
    };
    let min = area("min_pixels", "shortest_edge", DEFAULT_AREAS.0)?;
    let max = area("max_pixels", "longest_edge", DEFAULT_AREAS.1)?;
    if max < min.max(TOKEN_AREA) {
        let expected = "an area of at least shortest_edge and 1,024 pixels";
        return Err(ConfigError::Unsupported { file, key: "longest_edge", value: max.to_string(), expected });
    }
    Ok((min, max))
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN: &str = r#"{"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16,
        "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast"}"#;

    #[test]
    fn areas_come_from_either_file_or_are_the_models() {
        assert_eq!(areas(None, None).unwrap(), DEFAULT_AREAS);
        assert_eq!(areas(Some(QWEN), None).unwrap(), (65_536, 16_777_216));
        let nested =
            r#"{"image_processor": {"size": {"longest_edge": 2048, "shortest_edge": 1024}, "do_resize": true}}"#;
        assert_eq!(areas(Some(QWEN), Some(nested)).unwrap(), (1_024, 2_048));
        assert_eq!(areas(Some(QWEN), Some(r#"{"processor_class": "Qwen3VLProcessor"}"#)).unwrap(), DEFAULT_AREAS);
        let older = r#"{"size": {"longest_edge": 9, "shortest_edge": 9}, "min_pixels": 3136, "max_pixels": 12845056}"#;
        assert_eq!(areas(Some(older), None).unwrap(), (3_136, 12_845_056));
        assert_eq!(
            areas(Some(r#"{"size": {"max_pixels": 99999}, "min_pixels": null}"#), None).unwrap(),
            (65_536, 99_999)
        );
    }

    #[test]
    fn other_processors_are_refused_by_key() {
        for (change, key) in [
            (r#""image_processor_type": "CLIPImageProcessor""#, "image_processor_type"),
            (r#""patch_size": 14"#, "patch_size"),
            (r#""merge_size": 4"#, "merge_size"),
            (r#""image_mean": [0.48145466, 0.4578275, 0.40821073]"#, "image_mean"),
            (r#""do_rescale": false"#, "do_rescale"),
            (r#""resample": 2"#, "resample"),
            (r#""max_pixels": 500"#, "longest_edge"),
            (r#""max_pixels": -1"#, "max_pixels"),
            (r#""size": {"shortest_edge": "a"}"#, "shortest_edge"),
        ] {
            let message = areas(Some(&format!("{{{change}}}")), None).unwrap_err().to_string();
            assert!(message.starts_with(&format!("preprocessor_config.json has {key} = ")), "{message}");
        }
        assert!(areas(Some("[]"), None).unwrap_err().to_string().contains("not a JSON object"));
        assert!(areas(None, Some(r#"{"image_processor": 1}"#)).unwrap_err().to_string().contains("image_processor"));
        assert!(areas(Some(r#"{"rescale_factor": 0.00392156862745098}"#), None).is_ok());
    }
}
