//! Checkpoints with a layer that drafts, and a plain f32 reference of it.

use half::bf16;
use pegainfer_qwen35_4b::Qwen35;
use pegainfer_qwen35_4b::config::Config;
use pegainfer_runtime::Model;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Shape and values of each tensor.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A bundled checkpoint with an added layer that drafts, in its own directory.
pub struct Checkpoint(PathBuf, Tensors);

impl Drop for Checkpoint {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Checkpoint {
    /// A checkpoint whose layer mostly drafts the previous token.
    pub fn repeating(name: &str) -> Self {
        Self::repeating_of("qwen35-tiny", name)
    }

    /// Variant of [`repeating`](Self::repeating) of another bundled checkpoint.
    pub fn repeating_of(model: &str, name: &str) -> Self {
        Self::new(model, name, |tensors, hidden| {
            let (_, fc) = tensors.get_mut("mtp.fc.weight").unwrap();
            (0..hidden).for_each(|i| fc[2 * hidden * i + i] += 1.0);
        })
    }

    /// A checkpoint whose other layers leave the residual stream unchanged.
    pub fn without_layers(name: &str) -> Self {
        Self::new("qwen35-tiny", name, |tensors, _| {
            let ends = ["o_proj.weight", "out_proj.weight", "down_proj.weight"];
            for (name, (_, values)) in tensors.iter_mut().filter(|(name, _)| name.starts_with("model.")) {
                if ends.iter().any(|end| name.ends_with(end)) {
                    values.fill(0.0);
                }
            }
        })
    }

    fn new(model: &str, name: &str, change: impl Fn(&mut Tensors, usize)) -> Self {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models").join(model);
        let dir = std::env::temp_dir().join(format!("pegainfer-mtp-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for file in ["config.json", "generation_config.json"] {
            std::fs::copy(from.join(file), dir.join(file)).unwrap();
        }
        let mut tensors = Tensors::new();
        for entry in std::fs::read_dir(&from).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                let file = std::fs::read(path).unwrap();
                let stored = SafeTensors::deserialize(&file).unwrap();
                let values =
                    |(name, view): (&str, TensorView<'_>)| (name.to_owned(), (view.shape().to_vec(), widened(&view)));
                tensors.extend(stored.iter().map(values));
            }
        }
        let config = Qwen35::load_config(&from).unwrap();
        tensors.extend(layer(&config));
        change(&mut tensors, config.hidden_size);
        let bytes: Vec<_> = tensors
            .iter_mut()
            .map(|(name, (shape, values))| {
                let rounded = values.iter().map(|value| bf16::from_f32(*value));
                let bytes: Vec<u8> = rounded.flat_map(|value| value.to_le_bytes()).collect();
                values.iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
                (name.clone(), shape.clone(), bytes)
            })
            .collect();
        let views = bytes.iter().map(|(name, shape, bytes)| {
            // Unchanged from the bundled checkpoint.
            (name.clone(), TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap())
        });
        std::fs::write(dir.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
        Self(dir, tensors)
    }

    pub fn path(&self) -> PathBuf {
        self.0.clone()
    }
}

/// The values of a tensor in bf16 or f32.
pub fn widened(view: &TensorView<'_>) -> Vec<f32> {
    match view.dtype() {
        Dtype::BF16 => view.data().chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Dtype::F32 => view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        other => panic!("{other:?}"),
    }
}

/// The 15 tensors of the layer, with random values that all affect its drafts.
fn layer(config: &Config) -> Tensors {
    let (hidden, inner, shape) = (config.hidden_size, config.intermediate_size, config.shape);
    let (q, kv, dim) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.head_dim);
    let layer = |tail: &str| format!("mtp.layers.0.{tail}.weight");
    let mut state = 1u64;
    let mut random = |shape: &[usize], limit: f32| {
        let mut value = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * limit
        };
        (shape.to_vec(), (0..shape.iter().product()).map(|_| value()).collect())
    };
    BTreeMap::from([
        ("mtp.fc.weight".to_owned(), random(&[hidden, 2 * hidden], 0.05)),
        ("mtp.pre_fc_norm_embedding.weight".to_owned(), random(&[hidden], 0.3)),
        ("mtp.pre_fc_norm_hidden.weight".to_owned(), random(&[hidden], 0.3)),
        ("mtp.norm.weight".to_owned(), random(&[hidden], 0.3)),
        (layer("input_layernorm"), random(&[hidden], 0.3)),
        (layer("post_attention_layernorm"), random(&[hidden], 0.3)),
        (layer("self_attn.q_proj"), random(&[2 * q, hidden], 0.1)),
        (layer("self_attn.k_proj"), random(&[kv, hidden], 0.1)),
        (layer("self_attn.v_proj"), random(&[kv, hidden], 0.1)),
        (layer("self_attn.o_proj"), random(&[hidden, q], 0.05)),
        (layer("self_attn.q_norm"), random(&[dim], 0.3)),
        (layer("self_attn.k_norm"), random(&[dim], 0.3)),
        (layer("mlp.gate_proj"), random(&[inner, hidden], 0.1)),
        (layer("mlp.up_proj"), random(&[inner, hidden], 0.1)),
        (layer("mlp.down_proj"), random(&[hidden, inner], 0.05)),
    ])
}

/// The layer that drafts in f32, token by token, for a model whose hidden states are the embeddings normalised by its
/// final norm.
pub struct Reference<'a> {
    tensors: &'a Tensors,
    config: Config,
}

impl<'a> Reference<'a> {
    pub fn new(checkpoint: &'a Checkpoint) -> Self {
        Self { tensors: &checkpoint.1, config: Qwen35::load_config(&checkpoint.0).unwrap() }
    }

    /// Logits after the last of `tokens`. The model has computed the first `computed` of them; after these the layer
    /// continues from its own output.
    pub fn logits(&self, tokens: &[u32], computed: usize) -> Vec<f32> {
        let (mut keys, mut values, mut output) = (Vec::new(), Vec::new(), Vec::new());
        for position in 0..tokens.len() - 1 {
            let hidden = match position < computed {
                true => self.norm("model.language_model.norm.weight", self.embedding(tokens[position])),
                false => output,
            };
            let embedding = self.norm("mtp.pre_fc_norm_embedding.weight", self.embedding(tokens[position + 1]));
            let hidden = self.norm("mtp.pre_fc_norm_hidden.weight", &hidden);
            let mut stream = self.linear("mtp.fc.weight", &[embedding, hidden].concat());
            let input = self.norm("mtp.layers.0.input_layernorm.weight", &stream);
            add(&mut stream, &self.attention(&input, position, &mut keys, &mut values));
            let input = self.norm("mtp.layers.0.post_attention_layernorm.weight", &stream);
            let gate = self.linear("mtp.layers.0.mlp.gate_proj.weight", &input);
            let up = self.linear("mtp.layers.0.mlp.up_proj.weight", &input);
            let inner: Vec<f32> = gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
            add(&mut stream, &self.linear("mtp.layers.0.mlp.down_proj.weight", &inner));
            output = self.norm("mtp.norm.weight", &stream);
        }
        self.linear("model.language_model.embed_tokens.weight", &output)
    }

    fn attention(&self, x: &[f32], position: usize, keys: &mut Vec<Vec<f32>>, values: &mut Vec<Vec<f32>>) -> Vec<f32> {
        let shape = self.config.shape;
        let (dim, group) = (shape.head_dim, shape.heads / shape.kv_heads);
        let name = |tail: &str| format!("mtp.layers.0.self_attn.{tail}.weight");
        let head = |norm: &str, x: &[f32]| self.rotate(self.norm(&name(norm), x), position);
        let k = self.linear(&name("k_proj"), x);
        keys.push(k.chunks(dim).flat_map(|k| head("k_norm", k)).collect());
        values.push(self.linear(&name("v_proj"), x));
        let query = self.linear(&name("q_proj"), x);
        let mut attended = Vec::new();
        for (h, query) in query.chunks(2 * dim).enumerate() {
            let (q, gate) = (head("q_norm", &query[..dim]), &query[dim..]);
            let kv = h / group * dim..(h / group + 1) * dim;
            let score = |k: &Vec<f32>| (dot(&q, &k[kv.clone()]) / (dim as f32).sqrt()).exp();
            let weights: Vec<f32> = keys.iter().map(score).collect();
            let total: f32 = weights.iter().sum();
            attended.extend(gate.iter().enumerate().map(|(i, gate)| {
                let sum: f32 = weights.iter().zip(values.iter()).map(|(w, v)| w * v[kv.start + i]).sum();
                sum / total / (1.0 + (-gate).exp())
            }));
        }
        self.linear(&name("o_proj"), &attended)
    }

    /// RoPE of the first elements of a head; element `i` is paired with element `i` of the second half.
    fn rotate(&self, mut head: Vec<f32>, position: usize) -> Vec<f32> {
        let half = self.config.rotary_dim / 2;
        for i in 0..half {
            let angle = position as f64 * 1e7f64.powf(-(i as f64) / half as f64);
            let (sin, cos) = (angle.sin() as f32, angle.cos() as f32);
            let (a, b) = (head[i], head[i + half]);
            (head[i], head[i + half]) = (a * cos - b * sin, b * cos + a * sin);
        }
        head
    }

    fn tensor(&self, name: &str) -> &[f32] {
        &self.tensors[name].1
    }

    fn embedding(&self, token: u32) -> &[f32] {
        let hidden = self.config.hidden_size;
        &self.tensor("model.language_model.embed_tokens.weight")[token as usize * hidden..][..hidden]
    }

    fn norm(&self, name: &str, x: &[f32]) -> Vec<f32> {
        let scale = (dot(x, x) / x.len() as f32 + self.config.rms_norm_eps).sqrt().recip();
        x.iter().zip(self.tensor(name)).map(|(x, w)| x * scale * (1.0 + w)).collect()
    }

    fn linear(&self, name: &str, x: &[f32]) -> Vec<f32> {
        self.tensor(name).chunks(x.len()).map(|row| dot(row, x)).collect()
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(stream: &mut [f32], delta: &[f32]) {
    stream.iter_mut().zip(delta).for_each(|(s, d)| *s += d);
}
