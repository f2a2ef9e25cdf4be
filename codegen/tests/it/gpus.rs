//! What is known of GPUs: architectures, the table of GPUs, what was measured on them, and what is chosen by it.

mod architectures {
    use gemma4c_codegen::arch::Arch;
    #[test]
    fn names_round_trip_and_a_wrong_one_is_told_the_right_ones() {
        for arch in Arch::ALL.into_iter().chain([Arch::Compute80]) {
            assert_eq!(arch.name().parse(), Ok(arch));
        }
        let error = "sm_90".parse::<Arch>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown architecture `sm_90`; known are sm_80, sm_89, sm_90a, sm_100a, sm_103a, sm_120a, compute_80"
        );
    }

    #[test]
    fn a_gpu_gets_the_newest_target_that_runs_on_it() {
        let cases = [
            ((7, 5), None),
            ((8, 0), Some(Arch::Sm80)),
            ((8, 6), Some(Arch::Sm80)),
            ((8, 9), Some(Arch::Sm89)),
            ((9, 0), Some(Arch::Sm90a)),
            ((10, 0), Some(Arch::Sm100a)),
            ((10, 3), Some(Arch::Sm103a)),
            ((11, 0), Some(Arch::Compute80)),
            ((12, 0), Some(Arch::Sm120a)),
            ((12, 1), Some(Arch::Compute80)),
        ];
        for (capability, expected) in cases {
            assert_eq!(Arch::for_capability(capability), expected, "compute capability {capability:?}");
        }
    }
}

mod table {
    use gemma4c_codegen::arch::Arch;
    use gemma4c_codegen::target::{DeviceFacts, GPUS, Target};
    const KIB: u32 = 1 << 10;
    const MIB: u64 = 1 << 20;
    /// Shared memory of an SM that no block gets.
    const RESERVED: u32 = KIB;

    #[test]
    fn every_architecture_has_a_gpu_and_every_key_is_one() {
        for arch in Arch::ALL.into_iter().chain([Arch::Compute80]) {
            let gpu = Target::of_arch(arch);
            assert_eq!(gpu.arch, arch);
            assert_eq!(Target::of_program(&gpu.described()), Some(gpu));
        }
        for gpu in &GPUS {
            assert_eq!(Target::find(&gpu.key), Ok(gpu));
            assert!(gpu.shared_bytes_per_block <= gpu.arch.max_shared_bytes_per_block(), "{gpu}");
            assert_eq!(gpu.shared_bytes_per_multiprocessor, gpu.shared_bytes_per_block + RESERVED, "{gpu}");
        }
        let error = Target::find("voodoo2").unwrap_err().to_string();
        assert!(error.starts_with("no GPU is called `voodoo2`: there are h200, h100, "), "{error}");
        assert_eq!(Target::of_arch(Arch::Sm90a).key, "h200");
        assert_eq!(Target::of_arch(Arch::Sm89).key, "rtx-4090");
        assert_eq!(GPUS.iter().filter(|gpu| gpu.measured).map(|gpu| &gpu.key[..]).collect::<Vec<_>>(), ["h200"]);
    }

    #[test]
    fn a_driver_describes_a_row_of_the_table_or_a_target_of_its_own() {
        let facts = |name: &str, compute_capability, multiprocessors, shared: u32| DeviceFacts {
            name: name.into(),
            compute_capability,
            multiprocessors,
            shared_bytes_per_block: shared * KIB,
            shared_bytes_per_multiprocessor: (shared + 1) * KIB,
            l2_bytes: 7 * MIB,
        };
        let h200 = Target::of_device(&facts("NVIDIA H200", (9, 0), 132, 227)).unwrap();
        assert_eq!(&h200, Target::find("h200").unwrap());
        let part = Target::of_device(&facts("NVIDIA H200", (9, 0), 60, 227)).unwrap();
        assert_eq!((part.multiprocessors, part.l2_bytes, part.measured), (60, 7 * MIB, false));
        let older = Target::of_device(&facts("NVIDIA GeForce RTX 3080", (8, 6), 68, 99)).unwrap();
        assert_eq!((older.arch, older.multiprocessors, older.shared_bytes_per_block), (Arch::Sm80, 68, 99 * KIB));
        assert_eq!(older.bandwidth, Target::find("rtx-3090").unwrap().bandwidth);
        assert_eq!(Target::of_device(&facts("NVIDIA T4", (7, 5), 40, 64)), None);
    }

    #[test]
    fn fewer_multiprocessors_are_another_gpu() {
        let h200 = Target::of_arch(Arch::Sm90a);
        assert_eq!(h200.clone().with_multiprocessors(132), h200);
        let part = h200.with_multiprocessors(112);
        assert_eq!(part.to_string(), "H200 with 112 SMs (sm_90a, 112 SMs)");
        assert_eq!((&part.key[..], part.measured), ("h200-112", false));
    }

    #[test]
    fn a_floor_is_the_longer_of_reading_and_computing() {
        let gpu = Target::find("h200").unwrap();
        assert_eq!(gpu.floor(4_400_000, 0), 1e-6);
        assert_eq!(gpu.floor(4_400_000, 1_580_000_000), 2e-6);
    }
}

mod measurements {
    use gemma4c_codegen::measured::{H200, Measured, Question, Trial};
    const QUESTIONS: [Question; 8] = [
        Question::Warps,
        Question::FewestWarps,
        Question::SegmentKeys,
        Question::AttentionThreads,
        Question::ClusterBlocks,
        Question::PeersOfOneHead,
        Question::PeersOfHeads,
        Question::PerLayerBlocks,
    ];

    /// Rows of a question compare: one model, the same depths, a value once; and there is something to choose from.
    #[test]
    fn rows_of_a_question_compare() {
        for question in QUESTIONS {
            let rows: Vec<&Trial> = H200.trials.iter().filter(|trial| trial.question == question).collect();
            assert!(rows.len() >= 2, "{question:?} has nothing to choose from");
            let depths = |trial: &Trial| trial.tokens_per_second.iter().map(|(depth, _)| *depth).collect::<Vec<_>>();
            for row in &rows {
                assert_eq!((row.model, depths(row)), (rows[0].model, depths(rows[0])), "{question:?}");
                assert_eq!(rows.iter().filter(|other| other.value == row.value).count(), 1, "{row:?}");
            }
        }
        assert!(H200.trials.iter().all(|trial| QUESTIONS.contains(&trial.question)));
    }

    /// The table decides: a faster row is another answer.
    #[test]
    fn the_fastest_row_is_the_answer() {
        const fn of(value: u32, tokens_per_second: &'static [(u32, f32)]) -> Trial {
            Trial { question: Question::SegmentKeys, value, model: "a test", tokens_per_second }
        }
        const SLOW: Trial = of(64, &[(0, 470.0), (8192, 431.0)]);
        const FAST: Trial = of(128, &[(0, 473.0), (8192, 416.0)]);
        const FASTER: Trial = of(256, &[(0, 471.0), (8192, 431.0)]);
        static TWO: [Trial; 2] = [SLOW, FAST];
        static THREE: [Trial; 3] = [SLOW, FAST, FASTER];
        assert_eq!(
            Measured { multiprocessors: 132, trials: &TWO }.fastest(Question::SegmentKeys),
            64,
            "what counts is all depths"
        );
        assert_eq!(Measured { multiprocessors: 132, trials: &THREE }.fastest(Question::SegmentKeys), 256);
        assert_eq!(QUESTIONS.map(|question| H200.fastest(question)), [20, 20, 64, 512, 120, 8, 4, 16]);
    }
}

mod choices {
    use gemma4c_blocks::DType;
    use gemma4c_codegen::arch::Arch;
    use gemma4c_codegen::cuda::choice::{Choice, product};
    use gemma4c_codegen::kernels::matvec::Product;
    use gemma4c_codegen::kernels::matvec::Prologue;
    use gemma4c_codegen::target::Target;

    #[test]
    fn a_gpu_that_was_not_measured_is_chosen_for_by_rule() {
        let [h200, other] = ["h200", "rtx-4090"].map(|key| Target::find(key).expect("a GPU of the table"));
        let of = Product::new(DType::Q8_0, 2560, 10240, Prologue::Plain);
        let [measured, ruled] = [h200, other].map(|target| product(&of, target).1.on(target));
        assert!(!measured.reason.contains("by rule"), "{}", measured.reason);
        assert!(ruled.reason.starts_with("by rule: one row: "), "{}", ruled.reason);
        assert!(ruled.reason.contains("shaped for 128 SMs: "), "{}", ruled.reason);
        // Where there was nothing to choose, there was no rule either.
        assert_eq!(Choice::because("the only one").on(other), Choice::because("the only one"));
    }

    #[test]
    fn a_products_reason_is_of_its_own_sizes() {
        let down = Product::new(DType::Q4K, 2560, 10240, Prologue::Plain);
        let gate_and_up = Product { geglu: true, ..Product::new(DType::Q8_0, 10240, 2560, Prologue::ResidualNorm) };
        for of in [down, gate_and_up] {
            let target = Target::of_arch(Arch::Sm90a);
            let (shape, choice) = product(&of, &target);
            assert_eq!(shape, of.shape(&target));
            let (rows, k) = (of.rows(), of.k);
            let own = format!("product of {rows} x {k} {}, shaped for 132 SMs: {}", of.dtype, shape.describe());
            assert!(choice.reason.contains(&own), "{}", choice.reason);
            assert!(choice.runner_up.ends_with("of the score"), "{}", choice.runner_up);
            for foreign in ["tokens/s", "E4B", "us in a chain", "H200"] {
                assert!(!format!("{choice:?}").contains(foreign), "{choice:?}");
            }
        }
    }
}
