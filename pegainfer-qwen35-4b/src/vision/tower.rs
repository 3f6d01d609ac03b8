//! The forward pass of the vision tower over a batch of images.

use super::config::{MAX_PATCHES, MERGE, NORM_EPS, ROPE_THETA, VisionConfig};
use super::layout::{Image, Layout, MAX_SIDE, Sizes};
use super::weights::{Block, Norm, VisionWeights};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops;
use pegainfer_kernels::ops::vision::{self, Gelu, Grid, Segments, Then};
use std::ops::Range;

/// The tower's tables and activations.
#[derive(Debug)]
pub struct Tower {
    config: VisionConfig,
    /// Cosines and sines of rows and columns, `[MAX_SIDE, head_dim / 2]` f32.
    rope: Tensor,
    sizes: Sizes,
    buffers: Buffers,
}

/// Inputs and activations of `n` patches; activations have the tower's element type.
#[derive(Debug)]
struct Buffers {
    /// `[bytes]` u8.
    pixels: Tensor,
    /// `[n, 2]` u32.
    patches: Tensor,
    /// `[n, 4]` u32.
    corners: Tensor,
    /// `[n, 4]` f32.
    weights: Tensor,
    /// `[n, 2]` u32.
    positions: Tensor,
    /// `[n]` u32.
    slots: Tensor,
    /// `[images + 1]` u32.
    indptr: Tensor,
    /// The residual stream, `[n, hidden]`.
    x: Tensor,
    /// The stream normalised, or the output of attention, `[n, hidden]`.
    normed: Tensor,
    /// Unfolded patches, or queries, keys and values, or the MLP's activations: `[n, widest of these]`.
    wide: Tensor,
    /// Sums of a GEMM, f32, `[n, widest]`; scratch of attention.
    sums: Tensor,
    /// Output rows, `[n / 4, out_hidden]`.
    rows: Tensor,
}

impl Tower {
    /// A tower for up to [`MAX_PATCHES`] patches at once, whose activations have this element type, bf16 or f32.
    pub fn new(exec: &mut Exec, config: VisionConfig, dtype: DType) -> std::io::Result<Self> {
        let rope = ops::rope_table(exec, MAX_SIDE, config.head_dim() / 2, ROPE_THETA)?;
        Ok(Self { config, rope, sizes: Sizes::default(), buffers: Buffers::new(exec, &config, dtype)? })
    }

    /// Computes the [`rows`](Self::rows) of images, which do not depend on each other.
    ///
    /// # Errors
    /// Those of [`begin`](Self::begin).
    pub fn forward(&mut self, exec: &mut Exec, weights: &VisionWeights, images: &[Image<'_>]) -> Result<(), OpError> {
        self.begin(exec, weights, images)?;
        self.run_blocks(exec, weights, 0..weights.blocks.len())?;
        self.finish(exec, weights)
    }

    /// The first part of [`forward`](Self::forward): embeds the patches.
    ///
    /// # Errors
    /// No image, an image with a wrong grid or number of pixels, or more than [`MAX_PATCHES`] patches.
    pub fn begin(&mut self, exec: &mut Exec, weights: &VisionWeights, images: &[Image<'_>]) -> Result<(), OpError> {
        if images.is_empty() || !images.iter().all(Image::is_valid) {
            return Err(error("an image has a wrong grid or number of pixels"));
        }
        if images.iter().map(Image::patches).sum::<usize>() > MAX_PATCHES {
            return Err(error("the images have more patches than fit"));
        }
        let layout = Layout::new(images, self.config.side);
        self.sizes = layout.sizes;
        self.buffers.fill(exec, images, &layout)?;
        self.buffers.embed(exec, weights)
    }

    /// The next part: some of the blocks, in order.
    pub fn run_blocks(
        &mut self,
        exec: &mut Exec,
        weights: &VisionWeights,
        blocks: Range<usize>,
    ) -> Result<(), OpError> {
        let Self { config, rope, sizes, buffers } = self;
        for block in &weights.blocks[blocks] {
            buffers.attend(exec, block, (rope, *sizes), config)?;
            buffers.mlp(exec, block, config.intermediate)?;
        }
        Ok(())
    }

    /// The last part: blocks of patches to rows.
    pub fn finish(&mut self, exec: &mut Exec, weights: &VisionWeights) -> Result<(), OpError> {
        self.buffers.merge(exec, weights, &self.config)
    }

    /// The rows of the last images, one image after the other: `[patches / 4, out_hidden]`.
    pub fn rows(&self) -> &Tensor {
        &self.buffers.rows
    }
}

impl Buffers {
    fn new(exec: &mut Exec, config: &VisionConfig, dtype: DType) -> std::io::Result<Self> {
        let (n, hidden, merge) = (MAX_PATCHES, config.hidden, MERGE * MERGE);
        let widest = config.intermediate.max(3 * hidden).max(config.out_hidden.div_ceil(merge));
        let wide = config.intermediate.max(3 * hidden).max(vision::COPIES * vision::PATCH_VALUES);
        Ok(Self {
            pixels: exec.tensor("vision.pixels", &[n * vision::PATCH_VALUES], DType::U8)?,
            patches: exec.tensor("vision.patches", &[n, 2], DType::U32)?,
            corners: exec.tensor("vision.corners", &[n, 4], DType::U32)?,
            weights: exec.tensor("vision.weights", &[n, 4], DType::F32)?,
            positions: exec.tensor("vision.positions", &[n, 2], DType::U32)?,
            slots: exec.tensor("vision.slots", &[n], DType::U32)?,
            indptr: exec.tensor("vision.indptr", &[n / merge + 1], DType::U32)?,
            x: exec.tensor("vision.x", &[n, hidden], dtype)?,
            normed: exec.tensor("vision.normed", &[n, hidden], dtype)?,
            wide: exec.tensor("vision.wide", &[n, wide], dtype)?,
            sums: exec.tensor("vision.sums", &[n, widest], DType::F32)?,
            rows: exec.tensor("vision.rows", &[n / merge, config.out_hidden], dtype)?,
        })
    }

    /// Uploads the inputs and sets all tensors to their rows.
    fn fill(&mut self, exec: &mut Exec, images: &[Image<'_>], layout: &Layout) -> Result<(), OpError> {
        match images {
            [image] => exec.fill_rows(&mut self.pixels, image.pixels)?,
            _ => {
                let pixels = images.iter().map(|image| image.pixels).collect::<Vec<_>>().concat();
                exec.fill_rows(&mut self.pixels, &pixels)?;
            }
        }
        exec.fill_rows(&mut self.weights, &layout.weights)?;
        let inputs = [
            (&mut self.patches, &layout.patches),
            (&mut self.corners, &layout.corners),
            (&mut self.positions, &layout.positions),
            (&mut self.slots, &layout.slots),
            (&mut self.indptr, &layout.indptr),
        ];
        inputs.into_iter().try_for_each(|(tensor, values)| exec.fill_rows(tensor, values))?;
        let n = layout.positions.len() / 2;
        self.x.set_rows(n);
        self.normed.set_rows(n);
        self.rows.set_rows(n / (MERGE * MERGE));
        Ok(())
    }

    /// Pixels to the residual stream.
    fn embed(&mut self, exec: &mut Exec, weights: &VisionWeights) -> Result<(), OpError> {
        let Self { pixels, patches, corners, weights: parts, x, wide, sums, .. } = self;
        let (n, width) = (x.rows_cols().0, weights.patch.weight.rows_cols().1);
        wide.as_shape(&[n, width], DType::Bf16, |unfolded| {
            vision::unfold_patches(exec, pixels, patches, unfolded)?;
            vision::linear_bias(exec, unfolded, weights.patch.parts(), Then::Store, sums, x)
        })?;
        vision::add_positions(exec, &weights.positions, (corners, parts), x)
    }

    /// `x += attention(norm(x))`. `rope`: the table of angles.
    fn attend(
        &mut self,
        exec: &mut Exec,
        block: &Block,
        (rope, sizes): (&Tensor, Sizes),
        config: &VisionConfig,
    ) -> Result<(), OpError> {
        let Self { positions, slots, indptr, x, normed, wide, sums, .. } = self;
        let ((n, hidden), scale) = (x.rows_cols(), (config.head_dim() as f32).sqrt().recip());
        normalise(exec, x, &block.attention_norm, normed)?;
        wide.as_shape(&[n, 3 * hidden], x.dtype(), |qkv| {
            vision::linear_bias(exec, normed, block.qkv.parts(), Then::Store, sums, qkv)
        })?;
        wide.as_shape(&[n, 3, config.heads, config.head_dim()], x.dtype(), |qkv| {
            let grid = Grid { table: rope, positions, slots, segments: Segments { indptr, scores: sizes.scores } };
            vision::grid_attention(exec, qkv, (&grid, sizes.blocks), scale, sums, normed)
        })?;
        vision::linear_bias(exec, normed, block.out.parts(), Then::Add, sums, x)
    }

    /// `x += mlp(norm(x))`.
    fn mlp(&mut self, exec: &mut Exec, block: &Block, intermediate: usize) -> Result<(), OpError> {
        let Self { x, normed, wide, sums, .. } = self;
        let n = x.rows_cols().0;
        normalise(exec, x, &block.mlp_norm, normed)?;
        wide.as_shape(&[n, intermediate], x.dtype(), |activated| {
            vision::linear_bias(exec, normed, block.up.parts(), Then::Gelu(Gelu::Tanh), sums, activated)?;
            vision::linear_bias(exec, activated, block.down.parts(), Then::Add, sums, x)
        })
    }

    /// The residual stream to output rows: blocks of 2 x 2 patches are one row of the merger's input.
    fn merge(&mut self, exec: &mut Exec, weights: &VisionWeights, config: &VisionConfig) -> Result<(), OpError> {
        let Self { x, normed, wide, sums, rows, .. } = self;
        let shape = [rows.rows_cols().0, config.merged()];
        normalise(exec, x, &weights.norm, normed)?;
        normed.as_shape(&shape, x.dtype(), |blocks| {
            wide.as_shape(&shape, x.dtype(), |activated| {
                let (up, out) = (weights.merger_up.parts(), weights.merger_out.parts());
                vision::linear_bias(exec, blocks, up, Then::Gelu(Gelu::Erf), sums, activated)?;
                vision::linear_bias(exec, activated, out, Then::Store, sums, rows)
            })
        })
    }
}

fn normalise(exec: &mut Exec, x: &Tensor, norm: &Norm, out: &mut Tensor) -> Result<(), OpError> {
    vision::layer_norm(exec, x, (&norm.weight, &norm.bias), NORM_EPS, out)
}

fn error(message: &str) -> OpError {
    OpError { op: "vision tower", message: message.to_owned() }
}
