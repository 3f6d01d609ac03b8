//! `vision_config` of config.json.

use pegainfer_runtime::{ConfigError, ConfigFile, unsupported};
use serde_json::json;

/// Epsilon of every LayerNorm of the tower; config.json does not have it.
pub const NORM_EPS: f32 = 1e-6;
/// Base of the rotary frequencies of the tower; config.json does not have it.
pub const ROPE_THETA: f64 = 10_000.0;
/// Patches of a side of a block that becomes one row.
pub const MERGE: usize = 2;
/// Patches that the tower has memory for: those of one image of the most tokens.
pub const MAX_PATCHES: usize = MERGE * MERGE * pegainfer_core::images::MAX_TOKENS;

/// The numbers of the vision tower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VisionConfig {
    /// Blocks of attention and MLP.
    pub depth: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Width of an output row: that of the text model.
    pub out_hidden: usize,
    /// Learned positions of a side of the square table.
    pub side: usize,
    /// Id of the tokens whose embeddings the output replaces, `<|image_pad|>`.
    pub image_token: u32,
}

impl VisionConfig {
    /// Reads the fields; refuses unsupported ones by name. `rotary_dim`: rotated elements of the text model's heads.
    pub fn read(file: &ConfigFile, rotary_dim: usize) -> Result<Self, ConfigError> {
        if !file.get("vision_config").is_object() {
            return Err(file.invalid("vision_config is missing, so the model does not read images"));
        }
        file.require_served([
            ("vision_config.hidden_act", json!("gelu_pytorch_tanh"), "gelu_pytorch_tanh"),
            ("vision_config.in_channels", json!(3), "images of three colours"),
            ("vision_config.patch_size", json!(16), "patches of 16 x 16 pixels"),
            ("vision_config.temporal_patch_size", json!(2), "patches of two frames"),
            ("vision_config.spatial_merge_size", json!(2), "rows of 2 x 2 patches"),
            ("vision_config.deepstack_visual_indexes", json!([]), "towers without deepstack"),
            ("rope_parameters.mrope_interleaved", json!(true), "interleaved rotary positions"),
        ])?;
        let size = |field: &str| file.size(&format!("vision_config.{field}"));
        let config = Self {
            depth: size("depth")?,
            hidden: size("hidden_size")?,
            heads: size("num_heads")?,
            intermediate: size("intermediate_size")?,
            out_hidden: size("out_hidden_size")?,
            side: size("num_position_embeddings")?.isqrt(),
            image_token: image_token(file)?,
        };
        check_sections(file, rotary_dim)?;
        config.check(file, size("num_position_embeddings")?)?;
        Ok(config)
    }

    fn check(&self, file: &ConfigFile, positions: usize) -> Result<(), ConfigError> {
        if self.side * self.side != positions {
            return Err(unsupported("vision_config.num_position_embeddings", positions, "square tables"));
        }
        let supported = self.hidden.is_multiple_of(self.heads) && self.head_dim().is_multiple_of(8);
        if !supported || self.head_dim() > 128 {
            let value = format!("{} of {} heads", self.hidden, self.heads);
            return Err(unsupported("vision_config.hidden_size", value, "heads of a multiple of 8, up to 128"));
        }
        if self.out_hidden != file.size("hidden_size")? {
            return Err(file.invalid("vision_config.out_hidden_size is not the hidden_size of the text model"));
        }
        Ok(())
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// Width of the merger's input: a block of patches.
    pub fn merged(&self) -> usize {
        MERGE * MERGE * self.hidden
    }
}

fn image_token(file: &ConfigFile) -> Result<u32, ConfigError> {
    match file.token_ids("image_token_id")?[..] {
        [id] if (id as usize) < file.size("vocab_size")? => Ok(id),
        _ => Err(file.invalid("image_token_id is not the id of one token")),
    }
}

/// Checks `mrope_section`, the frequencies of time, row and column: frequency `i` takes axis `i % 3`.
fn check_sections(file: &ConfigFile, rotary_dim: usize) -> Result<(), ConfigError> {
    let (field, frequencies) = ("rope_parameters.mrope_section", rotary_dim / 2);
    let value = file.get(field);
    let interleaved = [0, 1, 2].map(|axis| (frequencies + 2 - axis) / 3);
    if value.is_null() || *value == json!(interleaved) {
        return Ok(());
    }
    Err(unsupported(field, value, "sections of equal size, 11, 11 and 10 of 32 frequencies"))
}
