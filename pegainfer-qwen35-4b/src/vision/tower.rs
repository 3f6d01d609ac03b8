//! The forward pass of the vision tower over a batch of images.

use super::config::{MERGE, NORM_EPS, ROPE_THETA, VisionConfig};
use super::layout::{Image, Layout, MAX_SIDE};
use super::weights::{Affine, Block, Norm, VisionWeights};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops;
use pegainfer_kernels::ops::vision::{self, Gelu, Segments};

/// The tower's tables and activations.
#[derive(Debug)]
pub struct Tower {
    config: VisionConfig,
    /// Element type of activations: bf16 or f32.
    dtype: DType,
    /// Cosines and sines of rows and columns, `[MAX_SIDE, head_dim / 2]` f32.
    rope: Tensor,
    /// Of the largest batch so far.
    buffers: Option<Buffers>,
}

/// Inputs and activations for a number of patches `n`; activations have the tower's element type.
#[derive(Debug)]
struct Buffers {
    /// Patches that fit.
    capacity: usize,
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
    /// `[images + 1]` u32.
    indptr: Tensor,
    /// The residual stream, `[n, hidden]`.
    x: Tensor,
    /// The stream normalised, or the output of attention, `[n, hidden]`.
    normed: Tensor,
    /// Queries, keys and values, or the MLP's activations, `[n, max(3 hidden, intermediate)]`.
    wide: Tensor,
    /// Sums of a GEMM, f32, `[n, widest]`.
    sums: Tensor,
    /// Output rows, `[n / 4, out_hidden]`.
    rows: Tensor,
}

impl Tower {
    /// A tower whose activations have this element type, bf16 or f32. Buffers are allocated by the first images.
    pub fn new(exec: &mut Exec, config: VisionConfig, dtype: DType) -> std::io::Result<Self> {
        let rope = ops::rope_table(exec, MAX_SIDE, config.head_dim() / 2, ROPE_THETA)?;
        Ok(Self { config, dtype, rope, buffers: None })
    }

    /// The rows of all images, one after the other: `[patches / 4, out_hidden]`, overwritten by the next call. An
    /// image's rows do not depend on the others.
    ///
    /// # Errors
    /// No image, or an image with a wrong grid or number of pixels; no memory; a GPU.
    pub fn forward(
        &mut self,
        exec: &mut Exec,
        weights: &VisionWeights,
        images: &[Image<'_>],
    ) -> Result<&Tensor, OpError> {
        if images.is_empty() || !images.iter().all(Image::is_valid) {
            return Err(error("an image has a wrong grid or number of pixels"));
        }
        let n = images.iter().map(Image::patches).sum();
        let layout = Layout::new(images, self.config.side);
        if self.buffers.as_ref().is_none_or(|buffers| buffers.capacity < n || buffers.indptr.max_rows() <= images.len())
        {
            self.buffers = None;
            let made = Buffers::new(exec, &self.config, self.dtype, (n, images.len()));
            self.buffers = Some(made.map_err(|e| error(&format!("no memory for {n} patches: {e}")))?);
        }
        let Some(buffers) = &mut self.buffers else { return Err(error("no buffers")) };
        buffers.fill(exec, images, &layout)?;
        buffers.embed(exec, weights)?;
        for block in &weights.blocks {
            buffers.attend(exec, block, (&self.rope, layout.scores), &self.config)?;
            buffers.mlp(exec, block, self.config.intermediate)?;
        }
        buffers.merge(exec, weights, &self.config)?;
        Ok(&buffers.rows)
    }
}

impl Buffers {
    fn new(exec: &mut Exec, config: &VisionConfig, dtype: DType, (n, images): (usize, usize)) -> std::io::Result<Self> {
        let (hidden, merge) = (config.hidden, MERGE * MERGE);
        let wide = config.intermediate.max(3 * hidden);
        let widest = wide.max(config.out_hidden.div_ceil(merge));
        Ok(Self {
            capacity: n,
            pixels: exec.tensor("vision.pixels", &[n * vision::PATCH_VALUES], DType::U8)?,
            patches: exec.tensor("vision.patches", &[n, 2], DType::U32)?,
            corners: exec.tensor("vision.corners", &[n, 4], DType::U32)?,
            weights: exec.tensor("vision.weights", &[n, 4], DType::F32)?,
            positions: exec.tensor("vision.positions", &[n, 2], DType::U32)?,
            indptr: exec.tensor("vision.indptr", &[images + 1], DType::U32)?,
            x: exec.tensor("vision.x", &[n, hidden], dtype)?,
            normed: exec.tensor("vision.normed", &[n, hidden], dtype)?,
            wide: exec.tensor("vision.wide", &[n, wide], dtype)?,
            sums: exec.tensor("vision.sums", &[n, widest], DType::F32)?,
            rows: exec.tensor("vision.rows", &[n / merge, config.out_hidden], dtype)?,
        })
    }

    /// Uploads the inputs and sets all tensors to their rows.
    fn fill(&mut self, exec: &mut Exec, images: &[Image<'_>], layout: &Layout) -> Result<(), OpError> {
        let pixels: Vec<u8> = images.iter().flat_map(|image| image.pixels).copied().collect();
        exec.fill_rows(&mut self.pixels, &pixels)?;
        exec.fill_rows(&mut self.weights, &layout.weights)?;
        let inputs = [
            (&mut self.patches, &layout.patches),
            (&mut self.corners, &layout.corners),
            (&mut self.positions, &layout.positions),
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
        let Self { pixels, patches, corners, weights: parts, x, .. } = self;
        vision::patch_embed(exec, pixels, patches, (&weights.patch, &weights.patch_bias), x)?;
        vision::add_positions(exec, &weights.positions, (corners, parts), x)
    }

    /// `x += attention(norm(x))`. `rope`: the table of angles, and the number of scores of a head.
    fn attend(
        &mut self,
        exec: &mut Exec,
        block: &Block,
        (rope, scores): (&Tensor, u64),
        config: &VisionConfig,
    ) -> Result<(), OpError> {
        let Self { positions, indptr, x, normed, wide, sums, .. } = self;
        let ((n, hidden), scale) = (x.rows_cols(), (config.head_dim() as f32).sqrt().recip());
        normalise(exec, x, &block.attention_norm, normed)?;
        wide.as_shape(&[n, 3 * hidden], x.dtype(), |qkv| {
            multiply(exec, normed, &block.qkv, sums, |exec, sums, bias| vision::add_bias(exec, sums, bias, qkv))?;
            vision::rotate_grid(exec, rope, positions, config.heads, qkv)?;
            vision::segment_attention(exec, qkv, Segments { indptr, scores }, (config.heads, scale), normed)
        })?;
        multiply(exec, normed, &block.out, sums, |exec, sums, bias| vision::add_bias_residual(exec, sums, bias, x))
    }

    /// `x += mlp(norm(x))`.
    fn mlp(&mut self, exec: &mut Exec, block: &Block, intermediate: usize) -> Result<(), OpError> {
        let Self { x, normed, wide, sums, .. } = self;
        let n = x.rows_cols().0;
        normalise(exec, x, &block.mlp_norm, normed)?;
        wide.as_shape(&[n, intermediate], x.dtype(), |activated| {
            multiply(exec, normed, &block.up, sums, |exec, sums, bias| {
                vision::bias_gelu(exec, sums, bias, Gelu::Tanh, activated)
            })?;
            multiply(exec, activated, &block.down, sums, |exec, sums, bias| {
                vision::add_bias_residual(exec, sums, bias, x)
            })
        })
    }

    /// The residual stream to output rows: blocks of 2 x 2 patches are one row of the merger's input.
    fn merge(&mut self, exec: &mut Exec, weights: &VisionWeights, config: &VisionConfig) -> Result<(), OpError> {
        let Self { x, normed, wide, sums, rows, .. } = self;
        let shape = [rows.rows_cols().0, config.merged()];
        normalise(exec, x, &weights.norm, normed)?;
        normed.as_shape(&shape, x.dtype(), |blocks| {
            wide.as_shape(&shape, x.dtype(), |activated| {
                multiply(exec, blocks, &weights.merger_up, sums, |exec, sums, bias| {
                    vision::bias_gelu(exec, sums, bias, Gelu::Erf, activated)
                })?;
                multiply(exec, activated, &weights.merger_out, sums, |exec, sums, bias| {
                    vision::add_bias(exec, sums, bias, rows)
                })
            })
        })
    }
}

fn normalise(exec: &mut Exec, x: &Tensor, norm: &Norm, out: &mut Tensor) -> Result<(), OpError> {
    vision::layer_norm(exec, x, (&norm.weight, &norm.bias), NORM_EPS, out)
}

/// The sums of `x · wᵀ`, in f32, and `then` with them and the bias.
fn multiply(
    exec: &mut Exec,
    x: &Tensor,
    affine: &Affine,
    sums: &mut Tensor,
    then: impl FnOnce(&mut Exec, &Tensor, &Tensor) -> Result<(), OpError>,
) -> Result<(), OpError> {
    let shape = [x.rows_cols().0, affine.weight.rows_cols().0];
    sums.as_shape(&shape, DType::F32, |sums| {
        match x.dtype() {
            DType::F32 => vision::linear_f32(exec, x, &affine.weight, sums)?,
            _ => ops::linear(exec, x, &affine.weight, sums)?,
        }
        then(exec, sums, &affine.bias)
    })
}

fn error(message: &str) -> OpError {
    OpError { op: "vision tower", message: message.to_owned() }
}
