//! `ops::moe::route` and `ops::moe::router` (csrc/moe/route.cu).

use crate::cuda::abi::{Entry, MoeRoute, MoeRouter};
use crate::limits::moe::{MAX_CHOSEN, MAX_EXPERTS};
use crate::limits::moe_route::{ROUTER_ROWS, ROUTER_THREADS, ROUTER_TOKENS, THREADS};
use crate::ops::moe::RouteSpec;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Most experts of each entry.
const MOST: [usize; 4] = [128, 256, 512, MAX_EXPERTS];
const ROUTE: [Entry<MoeRoute<'static>>; 4] =
    [MoeRoute::moe_route_128, MoeRoute::moe_route_256, MoeRoute::moe_route_512, MoeRoute::moe_route_1024];
const ROUTER: [Entry<MoeRouter<'static>>; 4] =
    [MoeRouter::moe_router_128, MoeRouter::moe_router_256, MoeRouter::moe_router_512, MoeRouter::moe_router_1024];

/// Index of the entry for so many experts.
fn entry(op: &'static str, spec: RouteSpec) -> Result<usize, OpError> {
    let RouteSpec { experts, chosen: k, .. } = spec;
    MOST.iter().position(|most| experts <= *most).filter(|_| k <= MAX_CHOSEN).ok_or_else(|| {
        let message = format!("{k} of {experts} experts: the GPU kernel takes {MAX_CHOSEN} of {MAX_EXPERTS}");
        OpError { op, message }
    })
}

pub(crate) fn route(
    exec: &mut Exec,
    logits: &Tensor,
    spec: RouteSpec,
    (chosen, weights): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let (op, (tokens, rows), RouteSpec { experts, chosen: k, .. }) = ("route", logits.rows_cols(), spec);
    let entry = ROUTE[entry(op, spec)?];
    let (normalize, shared) = (usize::from(spec.normalize), usize::from(spec.shared));
    let arguments = MoeRoute { logits, chosen, weights, tokens, rows, experts, k, normalize, shared };
    let launch = entry.launch(exec.gpu()?, op, arguments)?;
    // SAFETY: the op checked the shapes; a warp a token.
    unsafe { launch.overlapped().run([tokens.div_ceil(THREADS / 32), 1, 1], THREADS) }
}

pub(crate) fn router(
    exec: &mut Exec,
    x: &Tensor,
    w: &Tensor,
    spec: RouteSpec,
    logits: &mut Tensor,
    (chosen, weights): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let (op, (tokens, columns), RouteSpec { experts, chosen: k, .. }) = ("router", x.rows_cols(), spec);
    let (entry, rows) = (ROUTER[entry(op, spec)?], spec.rows());
    let (normalize, shared) = (usize::from(spec.normalize), usize::from(spec.shared));
    let gpu = exec.gpu()?;
    let counters = gpu.counters();
    #[rustfmt::skip]
    let arguments = MoeRouter {
        x, w, logits, chosen, weights, counters, tokens, columns, rows, experts, k, normalize, shared,
    };
    let launch = entry.launch(gpu, op, arguments)?.early(w).overlapped();
    let grid = [rows.div_ceil(ROUTER_ROWS), tokens.div_ceil(ROUTER_TOKENS), 1];
    // SAFETY: the op checked the shapes; the grid covers all logits, with a counter for each tile of tokens.
    unsafe { launch.run(grid, ROUTER_THREADS) }
}
