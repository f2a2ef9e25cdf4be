//! The printer on token streams: text in, text out, with no compiler around it.

use super::errors::Errors;
use super::function::{Attribute, Function};
use super::heads::{KernelPart, kernel_text, launch_bounds};
use super::printer::Printer;
use super::types::Structs;
use syn::ItemFn;

/// The printed kernel and the refusals, from source text: what the macro does, without a compiler around it.
fn print(attribute: &str, source: &str) -> (String, Vec<String>) {
    let item: ItemFn = syn::parse_str(source).unwrap();
    let attribute: Attribute = syn::parse_str(attribute).unwrap();
    let errors = Errors::default();
    let structs = Structs::default();
    let function = Function::read(&item, &structs, &errors);
    function.check_kernel(&errors);
    let mut printer = Printer::new(&function, &attribute.slots, true, &structs, &errors);
    printer.dynamic_shared = attribute.dynamic_shared;
    printer.body(&item.block, false);
    let bounds = launch_bounds(&mut printer, attribute.block.as_ref().unwrap(), &attribute);
    let body = printer.finish();
    // Of a view only rustc knows the fields: here they are what they are called.
    let text = kernel_text(&function, &attribute, &bounds, &body).into_iter().map(|part| match part {
        KernelPart::Text(text) => text,
        KernelPart::Params(param) if param.ty.is_struct() => format!("<parameters of {}>", param.name),
        KernelPart::Params(param) => param.ty.declare(&param.name.to_string()),
        KernelPart::Fields(param) => format!("<fields of {}>", param.name),
    });
    (text.collect(), errors.messages())
}

/// The printed body of a kernel over `x: Input<u32>, f: Input<f32>, out: Output<u32>, n: u32`.
#[track_caller]
fn check(body: &str, expected: &str) {
    let source = format!("fn k<const K: u32>(x: Input<u32>, f: Input<f32>, out: Output<u32>, n: u32) {{\n{body}\n}}");
    let (text, errors) = print("block = 32", &source);
    assert_eq!(errors, Vec::<String>::new());
    let lines: Vec<_> = text.lines().skip(1).map(|line| line.strip_prefix("    ").unwrap_or(line)).collect();
    assert_eq!(lines[..lines.len() - 1].join("\n"), expected);
}

#[track_caller]
fn refuse(body: &str, expected: &str) {
    let source = format!("fn k<const K: u32>(x: Input<u32>, f: Input<f32>, out: Output<u32>, n: u32) {{\n{body}\n}}");
    let (_, errors) = print("block = 32", &source);
    assert!(errors.iter().any(|error| error.contains(expected)), "{errors:?}");
}

#[test]
fn parentheses_follow_c_plus_plus() {
    check("let a = n & 1 == 0;", "auto a = (n & 1) == 0;");
    check("let a = n << 2 | n >> 3 & 7;", "auto a = (n << 2) | ((n >> 3) & 7);");
    check("let a = (n + 1) * 2 - (n - (K - 1));", "auto a = (n + 1) * 2 - (n - (K - 1));");
    check("let a = n * (K / 4) / 2 % 3;", "auto a = n * (K / 4) / 2 % 3;");
    check("let a = n > 1 && n < 3 || n == 9;", "auto a = (n > 1 && n < 3) || n == 9;");
    check("let a = !(n > 1);", "auto a = !(n > 1);");
    check("let a = (n + 1) as f32 as i8;", "auto a = (i8)(f32)(n + 1);");
    check("let a = -(-f[n]);", "auto a = -(-f[n]);");
    check("let a = (n as i32 - 1).min(3);", "auto a = min((i32)n - 1, 3);");
    check("let a = (if n > 1 { n } else { K }) + 1;", "auto a = (n > 1 ? n : K) + 1;");
}

#[test]
fn a_shadowing_name_gets_a_number() {
    check(
        "let n = n + 1;\nlet n = n * 2;\nfor i in 0..n {\n let n = i;\n out[n] = i;\n}\nout[0u32] = n;",
        "auto n_2 = n + 1;\nauto n_3 = n_2 * 2;\nfor (u32 i = 0; i < n_3; ++i) {\n    auto n_4 = i;\n    out[n_4] = i;\n}\nout[0u] = n_3;",
    );
    check("let lane_id = lane_id();", "auto lane_id_2 = lane_id();");
    check("let max = n.max(3);\nout[max] = max.min(4);", "auto max_ = max(n, 3);\nout[max_] = min(max_, 4);");
}

#[test]
fn literals_keep_their_width() {
    check("let a = 1u32;", "auto a = 1u;");
    check("let a: u64 = 5;", "u64 a = 5;");
    check("let a = n & 0xf0f0_f0f0;", "auto a = n & 0xf0f0f0f0u;");
    check("let a = n + 4000000000;", "auto a = n + 4000000000u;");
    check("let a = n as u64 + 10_000_000_000;", "auto a = (u64)n + 10000000000ull;");
    check("let a = f[n] * 2. + 1e-6 + 0.5f32 + 3f32;", "auto a = f[n] * 2.0f + 1e-6f + 0.5f + 3.0f;");
    check("let a = 7u8;", "auto a = (u8)7;");
}

#[test]
fn comments_and_blank_lines_stay() {
    check(
        "// before\nlet a = n; // behind\n\n/* a block */\nif a > 1 { // opens\n    out[a] = 1;\n    // last\n}\n// end",
        "// before\nauto a = n;  // behind\n\n// a block\nif (a > 1) {  // opens\n    out[a] = 1;\n    // last\n}\n// end",
    );
}

#[test]
fn loops_and_arrays() {
    check(
        "#[unroll]\nfor i in (n..K).by(4) { out[i] += i; }",
        "#pragma unroll\nfor (u32 i = n; i < K; i += 4) {\n    out[i] += i;\n}",
    );
    check("let mut acc = regs(0.0f32, K * 2);", "f32 acc[K * 2] = {};");
    check("let mut acc = regs(n, 4);", "u32 acc[4];\nfill(acc, n);");
    check("let tile = shared::<f32>(K);", "__shared__ __align__(16) f32 tile[K];");
    check(
        "const TILE: u32 = 8;\nlet tile = shared::<f32>(TILE);",
        "constexpr u32 TILE = 8;\n__shared__ __align__(16) f32 tile[TILE];",
    );
    check(
        "let v: u32;\nif n > 1 { v = 1; } else { v = 2; }\nout[v] = v;",
        "u32 v;\nif (n > 1) {\n    v = 1;\n} else {\n    v = 2;\n}\nout[v] = v;",
    );
    check(
        "let mut m = n;\nfor i in 0..m { m += i; }",
        "auto m = n;\nauto i_end = m;\nfor (u32 i = 0; i < i_end; ++i) {\n    m += i;\n}",
    );
    check(
        "for i in (0..x[n]).by(lane_id() + 1) {}",
        "auto i_end = x[n];\nauto i_step = lane_id() + 1;\nfor (u32 i = 0; i < i_end; i += i_step) {\n}",
    );
    check(
        "for i in 0u32..x[n] {}\nfor i in 0u32..x[1u32] {}",
        "auto i_end = x[n];\nfor (u32 i = 0u; i < i_end; ++i) {\n}\nauto i_end_2 = x[1u];\nfor (u32 i = 0u; i < i_end_2; ++i) {\n}",
    );
    refuse("let a = atomic_add(out, 0u32, 1) + atomic_add(out, 1u32, 1);", "either order");
    refuse("let a = warp_sum(1);", "give the literal a suffix");
    refuse("for i in 0..4 {}", "write `0u32..n`");
    refuse("let a = |v: u32| v;", "closures are refused");
}

#[test]
fn the_head_carries_bounds_slots_and_documentation() {
    let (text, errors) = print(
        "block = W * 32, min_blocks = 2 * W, cluster = W, dynamic_shared, slots(finish(v: f32) -> f32)",
        "/// Doc.\nfn k<const W: u32>(w: Weights<i8>, s: f32) { let t = shared::<f32>(W); t[0u32] = finish(s); }",
    );
    assert_eq!(errors, Vec::<String>::new());
    assert_eq!(
        text,
        "// Doc.\nextern \"C\" __global__ void CLUSTER __launch_bounds__(W * 32, 2 * W) k(weights<i8> w, f32 s FINISH_PARAMS) {\n    \
         f32* t = (f32*)(dynamic_shared + t_at);\n    t[0u] = finish(s FINISH_ARGS);\n}\n"
    );
}

#[test]
fn all_refusals_come_at_once() {
    let (_, errors) = print("block = 32", "fn k(n: usize) -> u32 { let a = 0; match n { _ => 1 } }");
    assert_eq!(errors.len(), 4, "{errors:?}");
}

#[test]
fn a_config_is_its_fields_and_a_view_is_put_together() {
    let (text, errors) = print(
        "block = S.WARPS * 32, dependent, early(S.KNOWN, kv.pages)",
        "fn k<const S: Shape, KV: Float>(kv: KvView<KV>, n: u32, out: Output<f32>) {\n\
         let tile = shared::<f32>(S.WARPS * 4);\nlet at = Place::<KV> { k: kv.k.offset(n), tile };\n\
         for i in 0u32..S.WARPS { kv.k[i] = at.k[n]; at.tile[i] += 1.0; }\nfill_all(kv, at);\n}",
    );
    assert_eq!(errors, Vec::<String>::new());
    assert_eq!(
        text,
        "extern \"C\" __global__ void __launch_bounds__(WARPS * 32) k(\n    <parameters of kv>,\n    u32 n,\n    f32* out) {\n    \
         KvView<KV> kv = {<fields of kv>};\n    __shared__ __align__(16) f32 tile[WARPS * 4];\n    \
         auto at = Place<KV>{kv.k + n, tile};\n    for (u32 i = 0u; i < WARPS; ++i) {\n        \
         kv.k[i] = at.k[n];\n        at.tile[i] += 1.0f;\n    }\n    fill_all(kv, at);\n}\n"
    );
    let refused = |body: &str| print("block = 32", &format!("fn k<const S: Shape>(kv: KvView<f32>) {{ {body} }}")).1;
    assert!(refused("let a = S;")[0].contains("write `S.FIELD`"));
    assert!(refused("kv.n = 3;")[0].contains("declare the struct `mut`"));
    assert!(refused("const D: u32 = 3; let a = S.D;")[0].contains("`D` of its own"));
    assert!(refused("let kv: Input<KvView<f32>> = kv.k;")[0].contains("lives in registers"));
}
