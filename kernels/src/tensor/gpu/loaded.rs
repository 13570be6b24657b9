//! Modules and functions loaded in a context of the CUDA driver.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc;
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

use super::{Properties, modules};
use crate::{Error, Result};

/// Dynamic shared memory that a kernel may use without raising its limit.
const SHARED_WITHOUT_ASKING: u32 = 48 << 10;

/// A kernel of a loaded module.
pub struct Function {
    pub handle: sys::CUfunction,
    /// Bytes of each parameter.
    pub sizes: Vec<usize>,
    /// The kernel's current limit of dynamic shared memory. Locked while it changes.
    shared: Mutex<u32>,
}

// SAFETY: functions belong to a context, not to a thread, and the driver's calls are thread-safe.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// Raises the limit of dynamic shared memory to at least `shared` bytes.
    pub fn allow(&self, shared: u32) -> std::result::Result<(), DriverError> {
        if shared <= SHARED_WITHOUT_ASKING {
            return Ok(());
        }
        let mut allowed = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if shared > *allowed {
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function exists.
            unsafe {
                result::function::set_function_attribute(self.handle, attribute, shared as i32)
            }?;
            *allowed = shared;
        }
        Ok(())
    }
}

/// Modules and functions of a context. Modules are loaded when their first kernel is launched, or
/// all at once, and stay.
pub struct Loaded {
    context: Arc<CudaContext>,
    pub properties: Properties,
    /// Streams for copies to the host and from the host. They run in parallel with the stream that
    /// computes.
    pub copies: Option<[Arc<CudaStream>; 2]>,
    modules: HashMap<&'static str, usize>,
    functions: HashMap<(&'static str, String), Arc<Function>>,
}

/// One entry per context of the process. A context is the process's share of a device, no matter
/// which code opened it.
static LOADED: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());

impl Loaded {
    fn new(context: &Arc<CudaContext>) -> std::result::Result<Self, DriverError> {
        use sys::CUdevice_attribute as A;
        let attribute = |a| context.attribute(a).map(|value| value.max(0) as u32);
        let properties = Properties {
            capability: (
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_per_block: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            l2: attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        };
        Ok(Self {
            context: context.clone(),
            properties,
            copies: None,
            modules: HashMap::new(),
            functions: HashMap::new(),
        })
    }

    /// The module of a file, loaded if it is not loaded yet. `name` is the kernel, for errors.
    fn module(&mut self, file: &'static str, name: &str) -> Result<sys::CUmodule> {
        if let Some(&module) = self.modules.get(file) {
            return Ok(module as sys::CUmodule);
        }
        let image = modules::MODULES.iter().find(|(stem, _)| *stem == file);
        let (_, image) =
            image.ok_or_else(|| Error::gpu(name, format!("there is no cuda/{file}.cu")))?;
        // SAFETY: a static fatbin, written by nvcc.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) };
        let capability = self.properties.capability;
        let module = module
            .map_err(|e| failed_to_load(name, &format!("loading cuda/{file}.cu"), capability, e))?;
        self.modules.insert(file, module as usize);
        Ok(module)
    }

    /// Loads the kernels of all files that the device has code for.
    pub fn load_all(&mut self) -> Result<()> {
        const ALL: &str = "all kernels";
        let capability = self.properties.capability;
        let for_this = |file: &&str| !file.ends_with("_sm90a") || capability == (9, 0);
        for file in modules::MODULES.iter().map(|(file, _)| *file).filter(for_this) {
            let module = self.module(file, ALL)?;
            let failed = |e| {
                failed_to_load(ALL, &format!("loading kernels of cuda/{file}.cu"), capability, e)
            };
            let mut count = 0;
            // SAFETY: a loaded module; one number.
            unsafe { sys::cuModuleGetFunctionCount(&mut count, module) }
                .result()
                .map_err(failed)?;
            let mut functions = vec![std::ptr::null_mut(); count as usize];
            // SAFETY: there is room for that many.
            unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module) }
                .result()
                .map_err(failed)?;
            for function in functions {
                // SAFETY: a function of the module.
                unsafe { sys::cuFuncLoad(function) }.result().map_err(failed)?;
            }
        }
        Ok(())
    }

    pub fn function(&mut self, file: &'static str, name: &str) -> Result<Arc<Function>> {
        let key = (file, name.to_string());
        if let Some(function) = self.functions.get(&key) {
            return Ok(function.clone());
        }
        let capability = self.properties.capability;
        let failed = |what: &str, e| failed_to_load(name, what, capability, e);
        let module = self.module(file, name)?;
        let c_name = CString::new(name).map_err(|e| Error::gpu(name, e.to_string()))?;
        // SAFETY: the module is loaded and stays.
        let handle = unsafe { result::module::get_function(module, c_name) }
            .map_err(|e| failed(&format!("looking for it in cuda/{file}.cu"), e))?;
        let mut sizes = Vec::new();
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function exists; two results. An index beyond the last parameter is an error.
        while unsafe { sys::cuFuncGetParamInfo(handle, sizes.len(), &mut offset, &mut size) }
            .result()
            .is_ok()
        {
            sizes.push(size);
        }
        let function =
            Arc::new(Function { handle, sizes, shared: Mutex::new(SHARED_WITHOUT_ASKING) });
        self.functions.insert(key, function.clone());
        Ok(function)
    }
}

fn failed_to_load(name: &str, what: &str, (major, minor): (u32, u32), e: DriverError) -> Error {
    Error::gpu(name, format!("{what}: {e} (compute capability {major}.{minor})"))
}

/// Makes the context current on this thread, and calls `f` with its modules and functions.
pub fn with_loaded<R>(
    context: &Arc<CudaContext>,
    op: &str,
    f: impl FnOnce(&mut Loaded) -> Result<R>,
) -> Result<R> {
    let failed = |e: DriverError| Error::gpu(op, e.to_string());
    context.bind_to_thread().map_err(failed)?;
    let mut all = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let at = all.iter().position(|loaded| loaded.context.cu_ctx() == context.cu_ctx());
    let at = match at {
        Some(at) => at,
        None => {
            all.push(Loaded::new(context).map_err(failed)?);
            all.len() - 1
        }
    };
    f(&mut all[at])
}
