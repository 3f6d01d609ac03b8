//! Property of GGUF headers: for any bytes, reading ends, tensors lie inside the file without overlapping, and the files
//! made from the metadata are JSON or one sentence of refusal.

use pegainfer_model_files::ModelFiles;
use pegainfer_model_files::gguf::{Gguf, Header, ShardTensor};
use pegainfer_testing::gguf::{Value, Writer};

/// Files that a header stands for.
const FILES: [&str; 4] = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"];

/// Checks an input: the bytes of a file.
pub fn check(data: &[u8]) {
    let header = match Header::read(data, data.len() as u64) {
        Ok(header) => header,
        Err(error) => return assert!(!error.to_string().contains('\n'), "one sentence: {error}"),
    };
    let mut end = 0;
    for tensor in &header.tensors {
        assert!(tensor.start >= end && tensor.bytes > 0, "{tensor:?}");
        end = tensor.start + tensor.bytes;
    }
    assert!(end <= data.len() as u64, "{end} of {}", data.len());
    let tensors = header.tensors.into_iter().map(|info| ShardTensor { file: 0, info }).collect();
    let files = vec!["model.gguf".into()];
    let files = ModelFiles::Gguf(Box::new(Gguf { files, metadata: header.metadata, tensors }));
    for name in FILES {
        match files.read(name) {
            Ok(text) => {
                let text = text.expect("metadata stands for it");
                assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok(), "{name}: {text}");
            }
            Err(error) => assert!(!error.to_string().contains('\n'), "one sentence: {error}"),
        }
    }
}

/// Small models of each architecture.
pub fn seeds() -> Vec<Vec<u8>> {
    ["qwen3", "qwen35"].map(|architecture| model(architecture).bytes()).into()
}

fn model(architecture: &str) -> Writer {
    let mut writer = Writer::default();
    writer.pair("general.architecture", architecture).pair("general.alignment", 32u32);
    for key in [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "rope.dimension_count",
        "ssm.conv_kernel",
        "ssm.state_size",
        "ssm.group_count",
        "ssm.time_step_rank",
        "ssm.inner_size",
    ] {
        writer.pair(&format!("{architecture}.{key}"), 32u32);
    }
    writer.pair(&format!("{architecture}.rope.freq_base"), 1e6f32);
    writer.pair(&format!("{architecture}.attention.layer_norm_rms_epsilon"), 1e-6f32);
    writer.pair(&format!("{architecture}.rope.scaling.type"), "yarn");
    writer.pair(&format!("{architecture}.rope.scaling.factor"), 2f32);
    writer.pair("tokenizer.ggml.model", "gpt2").pair("tokenizer.ggml.pre", "qwen2");
    let texts = |texts: &[&str]| Value::Texts(texts.iter().map(|text| (*text).to_owned()).collect());
    writer.pair("tokenizer.ggml.tokens", texts(&["a", "b", "ab", "<|im_end|>", "[PAD4]"]));
    writer.pair("tokenizer.ggml.token_type", Value::Integers(vec![1, 1, 1, 3, 5]));
    writer.pair("tokenizer.ggml.merges", texts(&["a b"]));
    writer.pair("tokenizer.ggml.eos_token_id", 3u32).pair("tokenizer.ggml.bos_token_id", 3u32);
    writer.pair("tokenizer.ggml.add_bos_token", Value::Flag(true)).pair("tokenizer.chat_template", "{{ messages }}");
    writer.tensor("token_embd.weight", &[5, 32], 8, vec![1; 5 * 34]);
    writer.tensor("blk.0.attn_norm.weight", &[32], 0, vec![0; 128]);
    writer
}
