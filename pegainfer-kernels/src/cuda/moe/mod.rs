//! Launchers of `ops::moe`.

use crate::moe_operands::{Experts, RouteSpec};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

pub(crate) fn route(
    _exec: &mut Exec,
    _logits: &Tensor,
    _spec: RouteSpec,
    _choice: (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    Err(OpError { op: "route", message: "has no GPU kernel yet; use --device cpu".to_owned() })
}

pub(crate) fn experts(
    _exec: &mut Exec,
    _x: &Tensor,
    _choice: (&Tensor, &Tensor),
    _experts: &Experts,
    _out: &mut Tensor,
) -> Result<(), OpError> {
    Err(OpError { op: "experts", message: "has no GPU kernel yet; use --device cpu".to_owned() })
}
