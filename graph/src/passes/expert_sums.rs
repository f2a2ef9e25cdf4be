//! Fuses the chosen experts' down product with their weighted sum: the experts' separate results are never stored.

use gemma4c_ops::Op;

use crate::fused::Fused;
use crate::graph::NodeId;
use crate::kinds::Kind;
use crate::passes::{Log, Pass, Run};

pub const PASS: Pass =
    Pass { name: "expert-sums", about: "the experts' last product with their weighted sum", run: Run::Fuse(run) };

fn run(fused: &mut Fused, log: &mut Log) {
    let sums: Vec<NodeId> =
        fused.graph.iter().filter(|(_, node)| matches!(node.op, Op::ExpertSum { .. })).map(|(id, _)| id).collect();
    for sum in sums {
        let graph = &fused.graph;
        let (Op::ExpertSum { scale }, &[down, routing]) = (graph.node(sum).op, &graph.node(sum).inputs[..]) else {
            continue;
        };
        let Op::ExpertMatMul { weight, first, len } = graph.node(down).op else { continue };
        let whole = first == 0 && len as u64 == graph.weight(weight).dim(1);
        if !whole || graph.node(down).inputs[1] != routing || fused.sole_user(down) != Some(sum) {
            log.refuse(graph.full_name(sum), "the experts' results are not those of one whole tensor for it alone");
            continue;
        }
        let input = graph.node(down).inputs[0];
        log.merge(fused, Kind::ExpertDown { weight, scale, input, routing, out: sum, dense: None }, &[down, sum]);
    }
}
