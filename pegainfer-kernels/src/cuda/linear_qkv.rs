//! `ops::linear_qkv`, as it was chosen.

use super::gemm_wgmma::linear_qkv_wgmma;
use super::linear::{bf16, linear};
use super::qkv::qk_norm_rope_write_kv;
use super::vectors;
use crate::choice::Qkv;
use crate::ops::{Heads, MatrixRef};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

pub(crate) fn linear_qkv(
    exec: &mut Exec,
    choice: &Qkv,
    (x, w): (&Tensor, MatrixRef<'_>),
    heads: &Heads<'_>,
    qkv: &mut Tensor,
    q: &mut Tensor,
    (k, v): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let op = "linear_qkv";
    vectors(op, x.rows_cols().1)?;
    match choice {
        Qkv::Wgmma => linear_qkv_wgmma(exec.gpu()?, op, (x, bf16(op, w)?), heads, q, (k, v)),
        Qkv::Separate(gemm) => {
            linear(exec, op, gemm, x, w, qkv)?;
            qk_norm_rope_write_kv(exec, qkv, heads, q, (k, v))
        }
    }
}
