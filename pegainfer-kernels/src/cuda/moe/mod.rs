//! Launchers of `ops::moe`.

mod route;

pub(crate) use route::route;

use crate::moe_operands::Experts;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

pub(crate) fn experts(
    _exec: &mut Exec,
    _x: &Tensor,
    _choice: (&Tensor, &Tensor),
    _experts: &Experts,
    _out: &mut Tensor,
) -> Result<(), OpError> {
    Err(OpError { op: "experts", message: "has no GPU kernel yet; use --device cpu".to_owned() })
}
