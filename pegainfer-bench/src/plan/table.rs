//! The recorded ops of a step as a table and as JSON.

use pegainfer_core::record::{OpRecord, Operand};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

/// One line of the printed plan. Equal nodes of several layers share a line.
struct PlanLine<'a> {
    first: usize,
    record: &'a OpRecord,
    count: usize,
    /// Indices of the lines whose output the first node of this line reads.
    after: Vec<usize>,
}

/// The plan as a table. Nodes that differ only in their layer share a line. Column `after` lists the lines whose
/// results a line reads.
pub fn table(records: &[OpRecord]) -> String {
    let lines = fold(records);
    let (bytes, flops) = totals(records);
    let percentage = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
    let mut out = format!(
        "{:>3} {:<22} {:>4} {:<46} {:<5} {:<12} {:>11} {:>9} {:>7} {:>7}  {}\n",
        "#", "op", "x", "shapes", "dtype", "kernel", "MB", "GFLOP", "% MB", "% FLOP", "after"
    );
    for (i, line) in lines.iter().enumerate() {
        let count = line.count as u64;
        let (b, f) = (line.record.bytes * count, line.record.flops * count);
        let after: Vec<String> = line.after.iter().map(ToString::to_string).collect();
        let dtype = line.record.writes.first().or(line.record.reads.first()).map(|o| o.dtype.to_string());
        let _ = writeln!(
            out,
            "{i:>3} {:<22} {:>4} {:<46} {:<5} {:<12} {:>11.3} {:>9.3} {:>7.2} {:>7.2}  {}",
            line.record.op,
            line.count,
            line.record.shapes(),
            dtype.unwrap_or_default(),
            line.record.kernel,
            b as f64 / 1e6,
            f as f64 / 1e9,
            percentage(b, bytes),
            percentage(f, flops),
            after.join(" ")
        );
    }
    let _ = writeln!(
        out,
        "total: {} nodes, {:.3} MB, {:.3} GFLOP, {:.2} FLOP/byte",
        records.len(),
        bytes as f64 / 1e6,
        flops as f64 / 1e9,
        flops as f64 / bytes.max(1) as f64
    );
    for (op, (calls, sent)) in exchanges(records) {
        let _ = writeln!(out, "{op}: {calls} calls, {:.3} MB sent by each rank", sent as f64 / 1e6);
    }
    out
}

/// Calls of each op that sends data to other ranks, and the bytes that a rank sends in all of them.
fn exchanges(records: &[OpRecord]) -> BTreeMap<&'static str, (usize, u64)> {
    let mut exchanges: BTreeMap<_, (usize, u64)> = BTreeMap::new();
    for record in records.iter().filter(|record| record.sent > 0) {
        let (calls, sent) = exchanges.entry(record.op).or_default();
        *calls += 1;
        *sent += record.sent;
    }
    exchanges
}

/// The plan as JSON: every node, with the indices of the nodes that it depends on.
pub fn json(records: &[OpRecord]) -> Value {
    let operand = |o: &Operand| json!({"id": o.id, "name": o.name, "shape": o.shape, "dtype": o.dtype.to_string()});
    let edges = edges(records);
    let nodes: Vec<Value> = records
        .iter()
        .zip(edges)
        .map(|(r, after)| {
            json!({
                "op": r.op,
                "kernel": r.kernel,
                "reads": r.reads.iter().map(operand).collect::<Vec<_>>(),
                "writes": r.writes.iter().map(operand).collect::<Vec<_>>(),
                "bytes": r.bytes,
                "flops": r.flops,
                "sent": r.sent,
                "after": after,
            })
        })
        .collect();
    let (bytes, flops) = totals(records);
    let sent: u64 = records.iter().map(|r| r.sent).sum();
    json!({"nodes": nodes, "bytes": bytes, "flops": flops, "sent": sent})
}

/// Bytes and FLOPs of all nodes.
pub fn totals(records: &[OpRecord]) -> (u64, u64) {
    (records.iter().map(|r| r.bytes).sum(), records.iter().map(|r| r.flops).sum())
}

/// For each node, the nodes that last wrote its operands.
fn edges(records: &[OpRecord]) -> Vec<Vec<usize>> {
    let mut writer: HashMap<u32, usize> = HashMap::new();
    records
        .iter()
        .enumerate()
        .map(|(i, record)| {
            let mut after: Vec<usize> = record.reads.iter().filter_map(|o| writer.get(&o.id).copied()).collect();
            after.sort_unstable();
            after.dedup();
            writer.extend(record.writes.iter().map(|o| (o.id, i)));
            after
        })
        .collect()
}

/// Key that a node shares with its counterparts in other layers: the op, and its operands' shapes and names without the
/// layer number.
fn kind(record: &OpRecord) -> (&'static str, Vec<(String, &[usize])>) {
    let name = |o: &Operand| o.name.split('.').filter(|part| part.parse::<usize>().is_err()).collect::<String>();
    let operands = record.reads.iter().chain(&record.writes);
    (record.op, operands.map(|o| (name(o), o.shape.as_slice())).collect())
}

fn fold(records: &[OpRecord]) -> Vec<PlanLine<'_>> {
    let edges = edges(records);
    let mut lines: Vec<PlanLine<'_>> = Vec::new();
    let mut line_of_kind = HashMap::new();
    let mut line_of_node = Vec::new();
    for (i, record) in records.iter().enumerate() {
        let line = *line_of_kind.entry(kind(record)).or_insert_with(|| {
            lines.push(PlanLine { first: i, record, count: 0, after: Vec::new() });
            lines.len() - 1
        });
        lines[line].count += 1;
        line_of_node.push(line);
    }
    for line in &mut lines {
        line.after = edges[line.first].iter().map(|&node| line_of_node[node]).collect();
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_models::engine;
    use pegainfer_qwen3_4b::Qwen3;
    use pegainfer_runtime::{Model, Overrides, record};
    use pegainfer_testing::model_dir;

    #[cfg(feature = "deepseek-v4")]
    #[test]
    fn a_rank_of_several_prints_what_it_sends() {
        let dir = model_dir().with_file_name("dsv4-tiny-fp4fp8");
        let records = engine::record_rank(&dir, &Overrides::default(), 2, (2, 1, 100)).unwrap();
        // Five layers, two rows of 256: 11 bf16 sums with a flag per word, and half of 4,096 logits in f32.
        let (sums, logits) = (2 * 11 * 2 * 256 * 2, 2 * 2048 * 4);
        let text = table(&records);
        assert!(text.contains("\nall_reduce: 11 calls, 0.023 MB sent by each rank\n"), "{text}");
        assert!(text.contains("\nall_gather: 1 calls, 0.016 MB sent by each rank\n"), "{text}");
        let json = json(&records);
        assert_eq!(json["sent"], sums + logits);
        let sent = |op: &str| {
            let nodes = json["nodes"].as_array().unwrap().iter().filter(|node| node["op"] == op);
            nodes.map(|node| node["sent"].as_u64().unwrap()).sum::<u64>()
        };
        assert_eq!((sent("all_reduce"), sent("all_gather"), sent("embed")), (sums, logits, 0));
        let alone = table(&engine::record(&dir, &Overrides::default(), 2, 1, 100).unwrap());
        assert!(!alone.contains("sent by"), "{alone}");
        let dense = engine::record_rank(&model_dir(), &Overrides::default(), 2, (2, 1, 100)).unwrap();
        // Two sums of a layer, of two rows of 320.
        let sent = |op: &str| dense.iter().filter(|record| record.op == op).map(|record| record.sent).sum::<u64>();
        let (sums, logits) = (sent("all_reduce") + sent("reduce_add_norm"), sent("all_gather"));
        assert!(sums >= 6 * 2 * 2 * 320 * 2 && logits == 2 * 2048 * 4, "{sums} {logits}");
        let error = engine::record_rank(&model_dir(), &Overrides::default(), 3, (2, 1, 100)).unwrap_err();
        let refused = "3 ranks cannot share 4 attention heads: --tensor-parallel-size takes 1, 2, 4 here";
        assert_eq!(error.to_string(), refused);
    }

    #[test]
    fn layers_fold_and_nothing_is_lost() {
        let records = record::<Qwen3>(&Qwen3::load_config(&model_dir()).unwrap(), 1, (8, 1, 1024)).unwrap();
        let lines = fold(&records);
        assert_eq!(lines.iter().map(|l| l.count).sum::<usize>(), records.len());
        assert!(lines.len() <= 15, "{} lines for {} nodes", lines.len(), records.len());
        let text = table(&records);
        assert!(text.contains("attention") && text.contains("total: 34 nodes"), "{text}");
        let json = json(&records);
        assert_eq!(json["nodes"].as_array().unwrap().len(), records.len());
        // Every node except the first reads the output of an earlier one.
        for (i, node) in json["nodes"].as_array().unwrap().iter().enumerate().skip(1) {
            let after = node["after"].as_array().unwrap();
            assert!(!after.is_empty() && after.iter().all(|n| n.as_u64().unwrap() < i as u64), "{node}");
        }
    }
}
