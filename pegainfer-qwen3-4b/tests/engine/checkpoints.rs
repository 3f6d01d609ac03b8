//! Layouts of Qwen3 checkpoints: one file or shards, tied or untied heads, a redundant head.

use crate::support::{BUNDLED, best, bundled_model, engine, greedy, options, run};
use half::{bf16, f16};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_qwen3_4b::Qwen3;
use pegainfer_runtime::{LoadOptions, Model, ModelBytes, load};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub const HEAD: &str = "lm_head.weight";
pub const EMBEDDING: &str = "model.embed_tokens.weight";

/// A copy of the checkpoint under test with files that can be changed.
pub struct Copy {
    pub dir: PathBuf,
    file: Vec<u8>,
}

impl Copy {
    pub fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("pegainfer-checkpoints-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for file in ["config.json", "generation_config.json"] {
            std::fs::copy(bundled().join(file), dir.join(file)).unwrap();
        }
        Self { dir, file: std::fs::read(bundled().join("model.safetensors")).unwrap() }
    }

    pub fn tensors(&self) -> BTreeMap<String, TensorView<'_>> {
        SafeTensors::deserialize(&self.file).unwrap().iter().map(|(n, v)| (n.to_owned(), v)).collect()
    }

    pub fn write<'a>(&self, name: &str, tensors: impl IntoIterator<Item = (&'a String, &'a TensorView<'a>)>) {
        std::fs::write(self.dir.join(name), serialize(tensors, None).unwrap()).unwrap();
    }

    pub fn set_config(&self, field: &str, value: Value) {
        let path = self.dir.join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config[field] = value;
        std::fs::write(path, config.to_string()).unwrap();
    }

    pub fn options(&self) -> LoadOptions {
        LoadOptions { model_path: self.dir.clone(), ..options() }
    }

    fn tokens(&self) -> Vec<u32> {
        generate(&self.options())
    }

    pub fn refusal(&self) -> String {
        let exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
        load::<Qwen3>(vec![exec], &self.options(), &mut |_, _| {}).unwrap_err().to_string()
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn bundled() -> PathBuf {
    bundled_model(BUNDLED)
}

fn generate(options: &LoadOptions) -> Vec<u32> {
    let mut engine = engine(best(), options);
    run(&mut engine, &[greedy(&[921, 870, 256, 533], 16)]).remove(0).ids()
}

fn expected() -> Vec<u32> {
    generate(&LoadOptions { model_path: bundled(), ..options() })
}

#[test]
fn shards_give_the_same_tokens_as_one_file() {
    let copy = Copy::new("shards");
    let tensors = copy.tensors();
    let mut weight_map = BTreeMap::new();
    for shard in 0..3 {
        let name = format!("model-{:05}-of-00003.safetensors", shard + 1);
        let part: Vec<_> = tensors.iter().skip(shard).step_by(3).collect();
        weight_map.extend(part.iter().map(|(tensor, _)| ((*tensor).clone(), name.clone())));
        copy.write(&name, part);
    }
    let index = json!({"metadata": {"total_size": 0}, "weight_map": weight_map});
    std::fs::write(copy.dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    assert_eq!(copy.tokens(), expected());
    std::fs::remove_file(copy.dir.join("model-00002-of-00003.safetensors")).unwrap();
    assert!(copy.refusal().contains("model-00002-of-00003.safetensors is missing"), "{}", copy.refusal());
}

/// The rows of the embedding, each moved to the id before it, as an output matrix.
fn moved_rows(tensors: &BTreeMap<String, TensorView<'_>>) -> Vec<u8> {
    let mut head = tensors[EMBEDDING].data().to_vec();
    head.rotate_left(2 * tensors[EMBEDDING].shape()[1]);
    head
}

/// Bytes of the weights as plans and the fit count them.
fn weight_bytes(dir: &Path) -> u64 {
    ModelBytes::of::<Qwen3>(&Qwen3::load_config(dir).unwrap()).unwrap().weights
}

#[test]
fn an_output_matrix_that_repeats_the_embedding_is_shared() {
    let copy = Copy::new("redundant");
    let mut tensors = copy.tensors();
    copy.write("model.safetensors", &tensors);
    let alone = weight_bytes(&copy.dir);
    tensors.insert(HEAD.to_owned(), tensors[EMBEDDING].clone());
    copy.write("model.safetensors", &tensors);
    assert_eq!(weight_bytes(&copy.dir), alone);
    let mut loaded = 0;
    let exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
    load::<Qwen3>(vec![exec], &copy.options(), &mut |bytes, _| loaded += bytes).unwrap();
    assert_eq!(loaded, alone);
    assert_eq!(copy.tokens(), expected());
}

#[test]
fn another_output_matrix_is_used_although_config_json_ties_it() {
    let copy = Copy::new("real-head");
    let mut tensors = copy.tensors();
    let head = moved_rows(&tensors);
    let view = TensorView::new(tensors[EMBEDDING].dtype(), tensors[EMBEDDING].shape().to_vec(), &head).unwrap();
    tensors.insert(HEAD.to_owned(), view);
    copy.write("model.safetensors", &tensors);
    // The same logits belong to other tokens.
    assert_eq!(copy.tokens()[0], (expected()[0] + 4095) % 4096);
    assert_eq!(weight_bytes(&copy.dir) - weight_bytes(&bundled()), head.len() as u64, "plans and the fit count it");
}

#[test]
fn an_untied_model_reads_its_output_matrix_and_takes_the_embedding_without_one() {
    let copy = Copy::new("untied");
    copy.set_config("tie_word_embeddings", json!(false));
    let mut tensors = copy.tensors();
    copy.write("model.safetensors", &tensors);
    assert_eq!(copy.tokens(), expected());

    let head = moved_rows(&tensors);
    let view = TensorView::new(tensors[EMBEDDING].dtype(), tensors[EMBEDDING].shape().to_vec(), &head).unwrap();
    tensors.insert(HEAD.to_owned(), view);
    copy.write("model.safetensors", &tensors);
    assert_eq!(copy.tokens()[0], (expected()[0] + 4095) % 4096);
}

#[test]
fn weights_in_f32_or_f16_give_the_tokens_of_their_bf16_values() {
    let copy = Copy::new("wide");
    copy.set_config("torch_dtype", json!("float32"));
    let tensors = copy.tensors();
    let narrow = |view: &TensorView<'_>| -> Vec<bf16> {
        view.data().chunks_exact(2).map(|bytes| bf16::from_le_bytes([bytes[0], bytes[1]])).collect()
    };
    // Every tensor in f32; only the norms in f32; only the norms in f16, which holds this model's bf16 norms exactly.
    for (dtype, norms_only) in [(Dtype::F32, false), (Dtype::F32, true), (Dtype::F16, true)] {
        let bytes: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = tensors
            .iter()
            .map(|(name, view)| {
                let converted = !norms_only || name.contains("norm");
                let bytes = match dtype {
                    _ if !converted => view.data().to_vec(),
                    Dtype::F32 => narrow(view).iter().flat_map(|value| value.to_f32().to_le_bytes()).collect(),
                    _ => narrow(view).iter().flat_map(|value| f16::from_f32(value.to_f32()).to_le_bytes()).collect(),
                };
                (name.clone(), if converted { dtype } else { view.dtype() }, view.shape().to_vec(), bytes)
            })
            .collect();
        let views: BTreeMap<String, TensorView<'_>> = bytes
            .iter()
            .map(|(name, dtype, shape, bytes)| (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()))
            .collect();
        copy.write("model.safetensors", &views);
        assert_eq!(copy.tokens(), expected(), "{dtype:?}, norms only: {norms_only}");
    }
}

#[test]
fn turns_end_with_the_ids_of_every_file() {
    let copy = Copy::new("eos");
    let ids = || Qwen3::load_config(&copy.dir).unwrap().eos_token_ids;
    copy.set_config("eos_token_id", json!(7));
    std::fs::write(copy.dir.join("generation_config.json"), json!({"eos_token_id": 9}).to_string()).unwrap();
    assert_eq!(ids(), [9, 7]);
    let tokenizer = json!({"eos_token": "<e>", "added_tokens_decoder": {"11": {"content": "<e>"}}});
    std::fs::write(copy.dir.join("tokenizer_config.json"), tokenizer.to_string()).unwrap();
    assert_eq!(ids(), [9, 7, 11]);
    std::fs::remove_file(copy.dir.join("generation_config.json")).unwrap();
    assert_eq!(ids(), [7, 11]);
    copy.set_config("eos_token_id", Value::Null);
    assert_eq!(ids(), [11]);
}

#[test]
fn a_config_of_other_weights_names_the_tensor() {
    let copy = Copy::new("mismatch");
    copy.write("model.safetensors", &copy.tensors());
    copy.set_config("intermediate_size", json!(512));
    let refusal = copy.refusal();
    assert!(refusal.contains("mlp.gate_proj.weight is BF16 [896, 320]"), "{refusal}");
    copy.set_config("intermediate_size", json!(896));
    copy.set_config("num_hidden_layers", json!(7));
    assert!(copy.refusal().contains("no tensor model.layers.6."), "{}", copy.refusal());
}

#[test]
fn options_that_cannot_work_say_so() {
    let refusal = |options: LoadOptions| {
        let exec = Exec::cpu(Isa::best(), Some(1)).unwrap();
        load::<Qwen3>(vec![exec], &options, &mut |_, _| {}).unwrap_err().to_string()
    };
    assert!(refusal(LoadOptions { max_model_len: Some(5000), ..options() }).contains("--max-model-len is 5000"));
    assert!(refusal(LoadOptions { max_num_seqs: Some(0), ..options() }).contains("--max-num-seqs is 0"));
    assert!(
        refusal(LoadOptions { max_num_batched_tokens: Some(8), ..options() }).contains("--max-num-batched-tokens is 8")
    );
    assert!(refusal(LoadOptions { kv_cache_bytes: Some(10), ..options() }).contains("--kv-cache-memory gives 0"));
}
