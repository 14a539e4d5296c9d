// Command kube is every Kubernetes program a kind node runs, and etcd, in one static binary.
//
// One link instead of eight keeps the cold build and the node image small. The program is chosen by the
// name the binary is called under (a symbolic link), or by the first argument when called as "kube".
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	kubeproxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubeadm "k8s.io/kubernetes/cmd/kubeadm/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// component runs a cobra command the way the upstream main functions of the control plane do.
func component(newCommand func() *cobra.Command) func() {
	return func() { os.Exit(cli.Run(newCommand())) }
}

func runKubectl() {
	logs.GlogSetter(kubectl.GetLogVerbosity(os.Args))
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		kubectlutil.CheckErr(err)
	}
}

func runKubeadm() {
	if err := kubeadm.Run(); err != nil {
		os.Exit(1)
	}
}

func main() {
	programs := map[string]func(){
		"etcd":                    func() { etcdmain.Main(os.Args) },
		"kube-apiserver":          component(apiserver.NewAPIServerCommand),
		"kube-controller-manager": component(controllermanager.NewControllerManagerCommand),
		"kube-proxy":              component(kubeproxy.NewProxyCommand),
		"kube-scheduler":          component(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
		"kubeadm":                 runKubeadm,
		"kubectl":                 runKubectl,
		"kubelet": component(func() *cobra.Command {
			return kubelet.NewKubeletCommand(context.Background())
		}),
	}
	name := filepath.Base(os.Args[0])
	if name == "kube" && len(os.Args) > 1 {
		name, os.Args = os.Args[1], os.Args[1:]
	}
	run, known := programs[name]
	if !known {
		fmt.Fprintf(os.Stderr, "kube: no program %q; call it under one of the names in cmd/kube/main.go\n", name)
		os.Exit(2)
	}
	run()
}
