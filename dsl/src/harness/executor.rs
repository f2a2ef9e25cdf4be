//! Who runs a case.

use super::{Argument, Case, CaseError, Data, Executor};
use crate::elements::ElementType;
use crate::host::HostKernel;
use crate::sim::{self, Arg, Memory, Options, Order};

/// The kernel's Rust body, with all checks.
#[derive(Clone, Debug)]
pub struct Simulator(pub Order);

/// The kernel's emitted text, compiled by the system's C++ compiler.
#[derive(Clone, Copy, Debug)]
pub struct Host;

impl Executor for Simulator {
    fn name(&self) -> String {
        let order = match self.0 {
            Order::Forward => "forward",
            Order::Reverse => "reverse",
            Order::Seeded(_) => "seeded",
        };
        format!("simulator, {order} order")
    }

    fn run(&self, case: &Case) -> Result<Vec<Option<Data>>, CaseError> {
        let mut prepared = Prepared::of(case)?;
        let options = Options { order: self.0.clone(), unchecked: false, partial_outputs: case.partial_outputs() };
        sim::launch(&case.instance, case.grid, &mut prepared.memory, &prepared.args, &options).map_err(|source| {
            CaseError::Launch { case: case.name.clone(), executor: self.name(), source: Box::new(source) }
        })?;
        Ok(prepared.results())
    }
}

impl Executor for Host {
    fn name(&self) -> String {
        "host-compiled text".to_string()
    }

    fn run(&self, case: &Case) -> Result<Vec<Option<Data>>, CaseError> {
        let mut prepared = Prepared::of(case)?;
        let host_error =
            |source| CaseError::Compiled { case: case.name.clone(), executor: self.name(), source: Box::new(source) };
        let kernel = HostKernel::build(&case.instance).map_err(host_error)?;
        kernel.launch(case.grid, &mut prepared.memory, &prepared.args, &Options::default()).map_err(host_error)?;
        Ok(prepared.results())
    }
}

impl Case {
    /// Runs the case in the simulator under three orders with all checks, and as emitted text on the host.
    pub fn check(&self) -> Result<(), CaseError> {
        for order in Order::ALL {
            self.check_on(&Simulator(order))?;
        }
        self.check_on(&Host)
    }

    /// [`Case::check`], for a test.
    #[track_caller]
    pub fn assert(&self) {
        if let Err(error) = self.check() {
            panic!("{error}");
        }
    }
}

/// A case's arguments in the simulator's memory.
struct Prepared {
    memory: Memory,
    args: Vec<Arg>,
    types: Vec<Option<ElementType>>,
}

impl Prepared {
    fn of(case: &Case) -> Result<Self, CaseError> {
        let mut prepared = Self { memory: Memory::new(), args: Vec::new(), types: Vec::new() };
        for argument in case.arguments()? {
            match argument {
                Argument::Scalar(scalar) => {
                    prepared.args.push(scalar.into());
                    prepared.types.push(None);
                }
                Argument::Buffer(data) => {
                    let id = prepared.memory.allocate(data.bytes().len());
                    prepared.memory.bytes_mut(id).copy_from_slice(data.bytes());
                    prepared.args.push(Arg::Memory(prepared.memory.view(id)));
                    prepared.types.push(Some(data.ty()));
                }
            }
        }
        Ok(prepared)
    }

    fn results(&self) -> Vec<Option<Data>> {
        let content = |arg: &Arg, ty: &Option<ElementType>| match (arg, ty) {
            (Arg::Memory(view), Some(ty)) => Some(Data::new(*ty, self.memory.bytes(view.allocation).to_vec())),
            _ => None,
        };
        self.args.iter().zip(&self.types).map(|(arg, ty)| content(arg, ty)).collect()
    }
}
