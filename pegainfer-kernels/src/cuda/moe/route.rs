//! `ops::moe::route` (csrc/moe/route.cu).

use crate::cuda::abi::{Entry, MoeRoute};
use crate::limits::moe::{MAX_CHOSEN, MAX_EXPERTS};
use crate::limits::moe_route::THREADS;
use crate::ops::moe::RouteSpec;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Entries, each with the most experts that it takes.
const ENTRIES: [(usize, Entry<MoeRoute<'static>>); 4] = [
    (128, MoeRoute::moe_route_128),
    (256, MoeRoute::moe_route_256),
    (512, MoeRoute::moe_route_512),
    (1024, MoeRoute::moe_route_1024),
];

pub(crate) fn route(
    exec: &mut Exec,
    logits: &Tensor,
    spec: RouteSpec,
    (chosen, weights): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let op = "route";
    let RouteSpec { experts, chosen: k, .. } = spec;
    let entry = ENTRIES.iter().find(|(most, _)| experts <= *most).filter(|_| k <= MAX_CHOSEN);
    let Some((_, entry)) = entry else {
        let message = format!("{k} of {experts} experts: the GPU kernel takes {MAX_CHOSEN} of {MAX_EXPERTS}");
        return Err(OpError { op, message });
    };
    let (tokens, rows) = logits.rows_cols();
    let (normalize, shared) = (usize::from(spec.normalize), usize::from(spec.shared));
    let arguments = MoeRoute { logits, chosen, weights, tokens, rows, experts, k, normalize, shared };
    let launch = entry.launch(exec.gpu()?, op, arguments)?;
    // SAFETY: the op checked the shapes; a warp a token.
    unsafe { launch.overlapped().run([tokens.div_ceil(THREADS / 32), 1, 1], THREADS) }
}
