//! The weights of the vision tower, `model.visual.*`. Matrices are bf16; biases and norms are f32.

use super::config::VisionConfig;
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{Loader, WeightsError};
use pegainfer_kernels::ops::vision::{self, COPIES, PATCH, PATCH_VALUES, patch_weight};

/// Beginning of the names of the tensors.
pub const PREFIX: &str = "model.visual.";
/// Frames of a patch; a still image is two equal ones.
const FRAMES: usize = 2;

/// A LayerNorm, both `[hidden]` f32.
#[derive(Debug)]
pub struct Norm {
    /// Factors.
    pub weight: Tensor,
    /// Summands.
    pub bias: Tensor,
}

/// A matrix with a bias.
#[derive(Debug)]
pub struct Affine {
    /// `[n, k]` bf16.
    pub weight: Tensor,
    /// `[n]` f32.
    pub bias: Tensor,
}

impl Affine {
    /// Both.
    pub(super) fn parts(&self) -> vision::Affine<'_> {
        (&self.weight, &self.bias)
    }
}

/// One block of attention and MLP.
#[derive(Debug)]
pub struct Block {
    /// Before attention.
    pub attention_norm: Norm,
    /// Queries, keys, values: `[3 hidden, hidden]`.
    pub qkv: Affine,
    /// `[hidden, hidden]`.
    pub out: Affine,
    /// Before the MLP.
    pub mlp_norm: Norm,
    /// `[intermediate, hidden]`.
    pub up: Affine,
    /// `[hidden, intermediate]`.
    pub down: Affine,
}

/// All weights of the tower.
#[derive(Debug)]
pub struct VisionWeights {
    /// The sum of both frames' weights in three parts ([`patch_weight`]), `[hidden, 3 * 768]`.
    pub patch: Affine,
    /// Learned positions, `[side * side, hidden]` bf16.
    pub positions: Tensor,
    /// First to last.
    pub blocks: Vec<Block>,
    /// Before patches are merged.
    pub norm: Norm,
    /// `[4 hidden, 4 hidden]`.
    pub merger_up: Affine,
    /// `[out_hidden, 4 hidden]`.
    pub merger_out: Affine,
}

impl VisionWeights {
    /// Loads every tensor of the tower.
    pub(crate) fn load(loader: &mut Loader<'_>, config: &VisionConfig) -> Result<Self, WeightsError> {
        let (hidden, merged) = (config.hidden, config.merged());
        let name = |tail: &str| format!("{PREFIX}{tail}");
        let (frames, unfolded) = ([hidden, 3, FRAMES, PATCH, PATCH], [hidden, COPIES * PATCH_VALUES]);
        let weight = loader.converted(name("patch_embed.proj.weight"), &frames, 0.01, &unfolded, |weight| {
            patch_weight(&add_frames(&weight))
        })?;
        Ok(Self {
            patch: Affine { weight, bias: vector(loader, name("patch_embed.proj.bias"), hidden, 0.0)? },
            positions: loader.matrix(name("pos_embed.weight"), config.side * config.side, hidden)?,
            blocks: (0..config.depth).map(|i| block(loader, config, i)).collect::<Result<_, _>>()?,
            norm: norm(loader, &name("merger.norm"), hidden)?,
            merger_up: affine(loader, &name("merger.linear_fc1"), merged, merged)?,
            merger_out: affine(loader, &name("merger.linear_fc2"), config.out_hidden, merged)?,
        })
    }
}

fn block(loader: &mut Loader<'_>, config: &VisionConfig, i: usize) -> Result<Block, WeightsError> {
    let (hidden, intermediate) = (config.hidden, config.intermediate);
    let name = |tail: &str| format!("{PREFIX}blocks.{i}.{tail}");
    Ok(Block {
        attention_norm: norm(loader, &name("norm1"), hidden)?,
        qkv: affine(loader, &name("attn.qkv"), 3 * hidden, hidden)?,
        out: affine(loader, &name("attn.proj"), hidden, hidden)?,
        mlp_norm: norm(loader, &name("norm2"), hidden)?,
        up: affine(loader, &name("mlp.linear_fc1"), intermediate, hidden)?,
        down: affine(loader, &name("mlp.linear_fc2"), hidden, intermediate)?,
    })
}

fn norm(loader: &mut Loader<'_>, name: &str, len: usize) -> Result<Norm, WeightsError> {
    let weight = vector(loader, format!("{name}.weight"), len, 1.0)?;
    Ok(Norm { weight, bias: vector(loader, format!("{name}.bias"), len, 0.0)? })
}

fn affine(loader: &mut Loader<'_>, name: &str, n: usize, k: usize) -> Result<Affine, WeightsError> {
    let weight = loader.matrix(format!("{name}.weight"), n, k)?;
    Ok(Affine { weight, bias: vector(loader, format!("{name}.bias"), n, 0.0)? })
}

/// A vector in f32; `dummy` is the value of dummy weights.
fn vector(loader: &mut Loader<'_>, name: String, len: usize, dummy: f32) -> Result<Tensor, WeightsError> {
    loader.converted(name, &[len], dummy, &[len], |values| values)
}

/// `[hidden, 3, 2, 16, 16]` to `[hidden, 3, 16, 16]`: the sum over the frames, which are equal in a still image.
fn add_frames(weight: &[f32]) -> Vec<f32> {
    let frames = weight.chunks_exact(FRAMES * PATCH * PATCH).map(|frames| frames.split_at(PATCH * PATCH));
    frames.flat_map(|(first, second)| first.iter().zip(second).map(|(a, b)| a + b)).collect()
}
