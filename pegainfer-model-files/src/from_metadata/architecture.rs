//! Architectures of GGUF files, and the Hugging Face names of their tensors.

use crate::error::FilesError;
use crate::gguf::{Gguf, Metadata, TensorInfo};

/// An architecture that is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// `qwen3`: Qwen3, dense.
    Qwen3,
    /// `qwen35`: Qwen3.5 and its successors, dense. The converter stores norms as `1 + w`, decay rates as
    /// `-exp(A_log)`, and value heads in tiled order.
    Qwen35,
    /// `qwen3moe`: Qwen3 with experts.
    Qwen3Moe,
    /// `qwen35moe`: Qwen3.5 with experts.
    Qwen35Moe,
}

/// Name after `blk.N.` in GGUF, and after the layer's prefix in Hugging Face's checkpoints.
const LAYER_NAMES: &[(&str, &str)] = &[
    ("attn_norm.weight", "input_layernorm.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
    ("ffn_gate_inp.weight", "mlp.gate.weight"),
    ("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight"),
    ("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
    ("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
    ("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
    // The matrices of all experts, whose rows follow each other: no name of Hugging Face's.
    ("ffn_gate_exps.weight", "mlp.experts.gate_proj.weight"),
    ("ffn_up_exps.weight", "mlp.experts.up_proj.weight"),
    ("ffn_down_exps.weight", "mlp.experts.down_proj.weight"),
    ("attn_qkv.weight", "linear_attn.in_proj_qkv.weight"),
    ("attn_gate.weight", "linear_attn.in_proj_z.weight"),
    ("ssm_alpha.weight", "linear_attn.in_proj_a.weight"),
    ("ssm_beta.weight", "linear_attn.in_proj_b.weight"),
    ("ssm_conv1d.weight", "linear_attn.conv1d.weight"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    // Written by Ollama.
    ("ssm_dt", "linear_attn.dt_bias"),
    ("ssm_a", "linear_attn.A_log"),
    ("ssm_norm.weight", "linear_attn.norm.weight"),
    ("ssm_out.weight", "linear_attn.out_proj.weight"),
];

/// Names of the block that drafts, after `blk.N.` in GGUF, and whole in Hugging Face's checkpoints.
const DRAFT_NAMES: &[(&str, &str)] = &[
    ("nextn.eh_proj.weight", "mtp.fc.weight"),
    ("nextn.enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
    ("nextn.hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
    ("nextn.shared_head_norm.weight", "mtp.norm.weight"),
];

impl Architecture {
    /// The architecture of a model.
    pub fn of(gguf: &Gguf) -> Result<Self, FilesError> {
        Self::named(&gguf.architecture()?).map_err(|message| FilesError::unsupported(&gguf.files[0], message))
    }

    /// The architecture with this name.
    fn named(name: &str) -> Result<Self, String> {
        match name {
            "qwen3" => Ok(Self::Qwen3),
            "qwen35" => Ok(Self::Qwen35),
            "qwen3moe" => Ok(Self::Qwen3Moe),
            "qwen35moe" => Ok(Self::Qwen35Moe),
            other => {
                let served = "qwen3, qwen3moe, qwen35 and qwen35moe are served";
                Err(format!("its architecture is {}, and {served}", other.escape_debug()))
            }
        }
    }

    /// Prefix of the metadata keys with the model's numbers.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Qwen3 => "qwen3",
            Self::Qwen35 => "qwen35",
            Self::Qwen3Moe => "qwen3moe",
            Self::Qwen35Moe => "qwen35moe",
        }
    }

    /// Prefix of the names of the decoder's tensors in Hugging Face's checkpoints.
    fn decoder(self) -> &'static str {
        match self {
            Self::Qwen3 | Self::Qwen3Moe => "model",
            Self::Qwen35 | Self::Qwen35Moe => "model.language_model",
        }
    }

    /// Layers of the decoder, and layers that draft after them; `block_count` counts both.
    pub fn layers(self, metadata: &Metadata) -> Result<(u64, u64), String> {
        let blocks = metadata.unsigned(&format!("{}.block_count", self.prefix()))?.unwrap_or(0);
        let drafts = metadata.unsigned(&format!("{}.nextn_predict_layers", self.prefix()))?.unwrap_or(0);
        Ok((blocks.saturating_sub(drafts), drafts))
    }

    /// Value heads of a key head of Qwen3.5's linear attention; 1 if the metadata has other numbers.
    fn tiles(self, gguf: &Gguf) -> usize {
        let heads = |tail: &str| {
            let heads = gguf.metadata.unsigned(&format!("{}.ssm.{tail}", self.prefix()));
            heads.ok().flatten().and_then(|heads| usize::try_from(heads).ok())
        };
        let (values, keys) = (heads("time_step_rank").unwrap_or(1), heads("group_count").unwrap_or(1));
        if keys > 0 && values > 0 && values.is_multiple_of(keys) { values / keys } else { 1 }
    }

    /// The Hugging Face name of the tensor `name`; `None` for a tensor that is not part of the model.
    pub fn weight_name(self, metadata: &Metadata, name: &str) -> Option<String> {
        let decoder = self.decoder();
        match name {
            "token_embd.weight" => return Some(format!("{decoder}.embed_tokens.weight")),
            "output_norm.weight" => return Some(format!("{decoder}.norm.weight")),
            "output.weight" => return Some("lm_head.weight".to_owned()),
            _ => {}
        }
        let (block, tail) = name.strip_prefix("blk.")?.split_once('.')?;
        let block: u64 = block.parse().ok()?;
        let found = |names: &[(&str, &'static str)]| names.iter().find(|(name, _)| *name == tail).map(|(_, to)| *to);
        let (layers, _) = self.layers(metadata).ok()?;
        match block.checked_sub(layers) {
            None => found(LAYER_NAMES).map(|tail| format!("{decoder}.layers.{block}.{tail}")),
            Some(draft) => {
                let whole = || found(DRAFT_NAMES).filter(|_| draft == 0).map(str::to_owned);
                found(LAYER_NAMES).map(|tail| format!("mtp.layers.{draft}.{tail}")).or_else(whole)
            }
        }
    }
}

/// Checks that the architecture `name` is served.
///
/// # Errors
/// A clause that says which ones are.
pub fn check_architecture(name: &str) -> Result<(), String> {
    Architecture::named(name).map(drop)
}

/// Name and shape of a tensor in Hugging Face's checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Weight {
    /// Name.
    pub name: String,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// Tiles that the columns are stored in. Equal parts of the columns of the checkpoint have an equal part of each
    /// tile: the converter puts the first value heads of all key heads first, then the second ones, and so on.
    pub tiles: usize,
}

/// The tensor `info` of this model as Hugging Face's checkpoints have it; `None` for a tensor that is not part of it,
/// such as those of an image encoder.
pub fn weight(gguf: &Gguf, info: &TensorInfo) -> Result<Option<Weight>, FilesError> {
    let architecture = Architecture::of(gguf)?;
    let name = architecture.weight_name(&gguf.metadata, &info.name);
    Ok(name.map(|name| {
        let mut shape = info.shape.clone();
        if name.ends_with("conv1d.weight") && shape.len() == 2 {
            // `[channels, 1, width]`, without the dimension of 1 in GGUF.
            shape.insert(1, 1);
        }
        if name.ends_with("shared_expert_gate.weight") && shape.len() == 1 {
            shape.insert(0, 1);
        }
        if let (true, &[experts, rows, columns]) = (name.contains(".mlp.experts."), &shape[..]) {
            shape = vec![experts.saturating_mul(rows), columns];
        }
        let tiles = if name.ends_with("linear_attn.out_proj.weight") { architecture.tiles(gguf) } else { 1 };
        Weight { name, shape, tiles }
    }))
}
